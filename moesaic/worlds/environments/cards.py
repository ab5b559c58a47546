"""A game of cards against a player with a habit: legal moves, and a plan for all rounds (after AgentBench).

    moesaic evaluate DIR --suite agents environments=cards
    environment: {name: cards, size: full}

In each round a prize is turned up, both play a card, the higher takes the prize, and equal ones share it (Goofspiel).
`small`: the cards 1 to 6, one game, and the habit is told. `full`: whole suits of 13, a match of three games with the
same player, and the habit has to be found out from how it plays. A reply that looks one card ahead wins against
every habit; playing high cards for high prizes does not. Won is 1, a draw a half, lost 0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from moesaic.worlds.text_actions import FORM, Finished, Invalid, Simulation, World

Habit = Callable[[list[int], int], int]  # from its hand, in order, and the prize

TOLD: dict[str, Habit] = {
    "always plays the card with the number of the prize": lambda hand, prize: prize,
    "always plays its highest card": lambda hand, prize: max(hand),
    "always plays its lowest card": lambda hand, prize: min(hand),
}
HABITS: dict[str, Habit] = TOLD | {
    "always plays the middle card of its hand, the higher of two": lambda hand, prize: hand[len(hand) // 2],
    "plays its highest card for an even prize and its lowest for an odd one": lambda hand, prize: (
        hand[0] if prize % 2 else hand[-1]
    ),
    "plays its lowest card that is above the prize, or else its lowest": lambda hand, prize: min(
        (card for card in hand if card > prize), default=hand[0]
    ),
}

RULES = """A game of cards for two. Each player holds the cards 1 to {cards}. There are {cards} prizes, worth 1 to \
{cards} points, turned up one by one in a random order. In each round both players play one card, each card only \
once in the game. The higher card takes the prize; if they are equal each gets half. {games}Whoever has more \
points in the end wins.
{habit}
Your only action is: play CARD
{form}
For example: Action: play 3
{round}"""


@dataclass(frozen=True)
class Size:
    cards: int
    games: int
    habit_told: bool


SIZES = {"small": Size(6, 1, True), "full": Size(13, 3, False)}


class Game(Simulation):
    def __init__(self, draw: random.Random, number: int, size: Size = SIZES["small"]) -> None:
        self.size = size
        habits = TOLD if size.habit_told else HABITS
        self.habit = list(habits)[number % len(habits)]
        whole = range(1, size.cards + 1)
        self.games = [draw.sample(whole, size.cards) for _ in range(size.games)]  # the prizes of each
        self.points, self.their_points = 0.0, 0.0
        self._deal()

    def _deal(self) -> None:
        self.prizes = self.games.pop(0)
        self.hand, self.theirs = list(range(1, self.size.cards + 1)), list(range(1, self.size.cards + 1))

    def open(self) -> str:
        habit = f"Your opponent has a habit: it {self.habit}."
        games = ""
        if not self.size.habit_told:
            habit = f"Your opponent has one of these habits, the same all the time: {'; '.join(HABITS)}."
            games = f"There are {self.size.games} such games, each with all cards, and points add up. "
        return RULES.format(cards=self.size.cards, games=games, habit=habit, form=FORM, round=self._round())

    def act(self, action: str) -> str | Finished:
        found = re.fullmatch(r"play (?:card )?(\d{1,3})\.?", action.casefold())
        if found is None:
            raise Invalid("That is no move. A move is: play CARD, where CARD is a number.")
        card = int(found[1])
        if card not in self.hand:
            raise Invalid(f"You do not hold {card}. Your hand: {_told(self.hand)}.")
        prize = self.prizes.pop(0)
        other = HABITS[self.habit](self.theirs, prize)
        self.hand.remove(card)
        self.theirs.remove(other)
        share = 1.0 if card > other else 0.5 if card == other else 0.0
        self.points += share * prize
        self.their_points += (1.0 - share) * prize
        took = {1.0: "You take it.", 0.5: "You share it.", 0.0: "Your opponent takes it."}[share]
        seen = f"You play {card}, your opponent plays {other}, for the prize of {prize}. {took}"
        seen += f" Points: you {self.points:g}, your opponent {self.their_points:g}."
        if not self.prizes and self.games:
            self._deal()
            seen += " A new game begins, with all cards."
        if self.prizes:
            return f"{seen}\n{self._round()}"
        won = (self.points > self.their_points) - (self.points < self.their_points)
        return Finished((won + 1) / 2, f"{seen} The game is over: {('lost', 'a draw', 'won')[won + 1]}.")

    def _round(self) -> str:
        cards = self.size.cards
        return (
            f"Round {cards - len(self.prizes) + 1} of {cards}: the prize is {self.prizes[0]}. "
            f"Your hand: {_told(self.hand)}. Your opponent's hand: {_told(self.theirs)}."
        )


def _told(hand: list[int]) -> str:
    return ", ".join(map(str, hand))


@dataclass(frozen=True)
class Cards(World):
    turns: int = 0  # 0: one for every card, and a few for mistakes
    size: str = "small"

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"size is one of {', '.join(SIZES)}")
        if not self.turns:
            object.__setattr__(self, "turns", SIZES[self.size].cards * SIZES[self.size].games + 4)
        super().__post_init__()

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        return Game(draw, number, SIZES[self.size])
