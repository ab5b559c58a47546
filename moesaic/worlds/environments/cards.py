"""A game of cards against a player whose habit is known: legal moves, and a plan for all rounds (after AgentBench).

    moesaic evaluate DIR --suite agents environments=cards

Both hold the cards 1 to 6. In each round a prize is turned up, both play a card, the higher one takes the prize, and
equal ones share it. A reply that looks one card ahead wins against every habit; playing high cards for high prizes
does not. Won is 1, a draw a half, lost 0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from moesaic.worlds.text_actions import FORM, Finished, Invalid, Simulation, World

CARDS = 6

# How the opponent chooses, in words, and from its hand and the prize.
HABITS: dict[str, Callable[[list[int], int], int]] = {
    "always plays the card with the number of the prize": lambda hand, prize: prize,
    "always plays its highest card": lambda hand, prize: max(hand),
    "always plays its lowest card": lambda hand, prize: min(hand),
}

RULES = """A game of cards for two. Each player holds the cards 1 to {cards}. There are {cards} prizes, worth 1 to \
{cards} points, turned up one by one in a random order. In each round both players play one card, each card only \
once in the game. The higher card takes the prize; if they are equal each gets half. Whoever has more \
points in the end wins.
Your opponent has a habit: it {habit}.
Your only action is: play CARD
{form}
For example: Action: play 3
{round}"""


class Game(Simulation):
    def __init__(self, draw: random.Random, number: int) -> None:
        self.habit = list(HABITS)[number % len(HABITS)]
        self.prizes = draw.sample(range(1, CARDS + 1), CARDS)
        self.hand, self.theirs = list(range(1, CARDS + 1)), list(range(1, CARDS + 1))
        self.points, self.their_points = 0.0, 0.0

    def open(self) -> str:
        return RULES.format(cards=CARDS, habit=self.habit, form=FORM, round=self._round())

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
        if self.prizes:
            return f"{seen}\n{self._round()}"
        won = (self.points > self.their_points) - (self.points < self.their_points)
        return Finished((won + 1) / 2, f"{seen} The game is over: {('lost', 'a draw', 'won')[won + 1]}.")

    def _round(self) -> str:
        return (
            f"Round {CARDS - len(self.prizes) + 1} of {CARDS}: the prize is {self.prizes[0]}. "
            f"Your hand: {_told(self.hand)}. Your opponent's hand: {_told(self.theirs)}."
        )


def _told(hand: list[int]) -> str:
    return ", ".join(map(str, hand))


@dataclass(frozen=True)
class Cards(World):
    turns: int = CARDS + 4  # a few mistakes

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        return Game(draw, number)
