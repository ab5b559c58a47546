"""A web shop in a browser: find what is asked for, choose its options, buy it for no more than is given (WebShop).

    moesaic evaluate DIR --suite agents environments=shop
    environment: {name: shop, browser: text}

The catalogue is generated. Bought is judged as in WebShop: the share of wanted attributes, options and the price limit
that hold, times how near the kind of product is to the wanted one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from moesaic.worlds.browser.surfing import SiteWorld, Surfing
from moesaic.worlds.browser.window import Request, Response, choice, form, link, page, textbox
from moesaic.worlds.text_actions import Finished, Simulation

# Departments, the kinds of products in them, and what such a product may be said to be.
DEPARTMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "furniture": (
        ("lamp", "chair", "desk", "shelf", "mirror"),
        ("foldable", "handmade", "oak", "scratch-proof", "stackable", "adjustable", "two-tone", "child-safe"),
    ),
    "clothing": (
        ("jacket", "scarf", "shirt", "hat", "gloves"),
        ("waterproof", "lined", "organic", "machine-washable", "windproof", "reflective", "breathable", "quilted"),
    ),
    "kitchen": (
        ("kettle", "pan", "grinder", "jug", "cutting board"),
        ("dishwasher-safe", "cordless", "non-stick", "insulated", "stainless", "heatproof", "silent", "shatterproof"),
    ),
    "travel": (
        ("backpack", "suitcase", "tent", "flask", "pouch"),
        ("lightweight", "lockable", "waxed", "expandable", "insect-proof", "padded", "recycled", "carry-on"),
    ),
}
BRANDS = ("Alder", "Birke", "Corvo", "Dune", "Elster", "Fenn", "Gale", "Hollin")
COLOURS = ("black", "blue", "green", "grey", "red", "white", "yellow")
SIZES = ("small", "medium", "large", "extra large")
PRODUCTS, PER_PAGE = 60, 6

ABOUT = "You are a customer of a web shop."
OWN = "leave (without buying anything)"


@dataclass(frozen=True)
class Product:
    number: int
    brand: str
    department: str
    kind: str
    attributes: tuple[str, ...]
    colours: tuple[str, ...]
    sizes: tuple[str, ...]
    price: int  # cents

    @property
    def name(self) -> str:
        return f"{self.brand} {self.attributes[0]} {self.kind}"


@dataclass(frozen=True)
class Goal:
    kind: str
    department: str
    attributes: tuple[str, ...]
    options: dict[str, str]
    price: int

    def __str__(self) -> str:
        options = " and ".join(f"{name} {value}" for name, value in self.options.items())
        wanted = f"buy a {self.kind} that is {' and '.join(self.attributes)}, in {options}"
        return f"{wanted}, for at most {told(self.price)}."

    def reward(self, product: Product, options: dict[str, str]) -> float:
        near = 1.0 if product.kind == self.kind else 0.5 if product.department == self.department else 0.0
        right = len(set(self.attributes) & set(product.attributes))
        right += sum(options.get(name) == value for name, value in self.options.items())
        right += product.price <= self.price
        return near * right / (len(self.attributes) + len(self.options) + 1)


def told(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


class Shop(Surfing):
    about, own_actions = ABOUT, OWN

    def __init__(self, draw: random.Random, browser: str) -> None:
        self.browser = browser
        self.products = [self._product(draw, number) for number in range(PRODUCTS)]
        wanted = draw.choice(self.products)
        attributes = tuple(draw.sample(wanted.attributes, 2))
        options = {"colour": draw.choice(wanted.colours), "size": draw.choice(wanted.sizes)}
        price = wanted.price + draw.randrange(1, 800)
        self.goal = Goal(wanted.kind, wanted.department, attributes, options, price)
        self.task = str(self.goal)

    def _product(self, draw: random.Random, number: int) -> Product:
        department = draw.choice(sorted(DEPARTMENTS))
        kinds, attributes = DEPARTMENTS[department]
        return Product(
            number,
            draw.choice(BRANDS),
            department,
            draw.choice(kinds),
            tuple(draw.sample(attributes, 3)),
            tuple(sorted(draw.sample(COLOURS, 3))),
            tuple(size for size in SIZES if draw.random() < 0.6) or SIZES[:1],
            draw.randrange(500, 9_900),
        )

    def finish(self, action: str) -> Finished | None:
        return Finished(0.0, "You leave without buying anything.") if action.casefold().strip(". ") == "leave" else None

    def respond(self, request: Request) -> Response:
        parts = request.path.strip("/").split("/")
        if parts == ["search"]:
            return self._found(request)
        if parts[0] in ("item", "features", "buy") and len(parts) == 2 and parts[1] in map(str, range(PRODUCTS)):
            product = self.products[int(parts[1])]
            if parts[0] == "buy" and request.sent:
                return self._buy(product, dict(request.fields))
            return self._features(product) if parts[0] == "features" else self._item(product)
        return page("Shop", f"<p>Departments: {', '.join(sorted(DEPARTMENTS))}.</p>{_search()}")

    def _found(self, request: Request) -> Response:
        """Products by how many of the words fit, as a shop's search finds them: what is only alike comes too."""
        words = request.fields.get("q", "").casefold().split()[:20]
        fits = {product.number: _fit(product, words) for product in self.products}
        found = [number for number in sorted(fits, key=lambda number: (-fits[number], number)) if fits[number]]
        first = request.fields.get("page", "1")
        number = min(max(int(first) if first.isdecimal() and len(first) < 4 else 1, 1), -(-len(found) // PER_PAGE) or 1)
        shown = [self.products[n] for n in found[(number - 1) * PER_PAGE : number * PER_PAGE]]
        lines = "".join(f"<p>{link(f'/item/{p.number}', p.name)} {told(p.price)}</p>" for p in shown)
        more = ""
        if number * PER_PAGE < len(found):
            query = "+".join("".join(c for c in word if c.isalnum() or c == "-") for word in words)
            more = f"<p>{link(f'/search?q={query}&page={number + 1}', 'Next page')}</p>"
        return page(f"{len(found)} products, page {number}", lines + more + _search())

    def _item(self, product: Product) -> Response:
        content = f"<p>Price: {told(product.price)}</p><p>{link(f'/features/{product.number}', 'Features')}</p>"
        options = choice("colour", "colour", list(product.colours)) + choice("size", "size", list(product.sizes))
        return page(product.name, content + form(f"/buy/{product.number}", options, "Buy now") + _search())

    def _features(self, product: Product) -> Response:
        lines = "".join(f"<li>{attribute}</li>" for attribute in sorted(product.attributes))
        return page(f"{product.name}: features", f"<ul>{lines}</ul>{link(f'/item/{product.number}', 'To the product')}")

    def _buy(self, product: Product, options: dict[str, str]) -> Response:
        if self.ended is None:
            self.ended = Finished(self.goal.reward(product, options), f"You have bought the {product.name}.")
        return page("Thank you", f"<p>You have bought the {product.name}.</p>")


def _search() -> str:
    return form("/search", textbox("q", "Search"), "Search", send=False)


def _fit(product: Product, words: list[str]) -> int:
    """The kind of product counts twice."""
    name = product.kind.split()
    known = {product.brand.casefold(), product.department, *product.attributes, *product.colours}
    return sum(2 * (word in name) + (word in known) for word in words)


@dataclass(frozen=True)
class WebShop(SiteWorld):
    turns: int = 40

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        return Shop(draw, self.browser)
