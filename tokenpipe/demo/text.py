"""The prompts, where a text ends, and token ids as text while they arrive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Beginnings that suit what the model was trained on: Lewis Carroll's Alice books, and Sylvie and
# Bruno. Plain quotes are left out: the books print typographic ones.
PROMPTS = (
    "Alice was beginning to get very tired of sitting by her sister on the bank",
    "The White Rabbit",
    "Down, down, down",
    "The Queen of Hearts said to the Hatter",
    "The Caterpillar took",
    "Once upon a time there were three little sisters",
    "The Red Queen shook her head",
    "It was all very well to say so, but the wise little Alice",
    "The Professor looked at Bruno",
    "Sylvie and I",
    "The Cheshire Cat only grinned when it saw Alice",
    "The Mock Turtle sighed deeply, and began",
    "The other Professor",
    "The Knight looked down at his horse, and then",
    "Humpty Dumpty",
    "There was a table set out under a tree in front of the house, and the March Hare",
    "The Gardener sang in a low voice as he went",
    "In another moment",
    "The Dormouse shook its head and said, without opening its eyes",
    "Lady Muriel smiled",
)

# The model was trained on running text and never learnt to say <eos>: a text ends where a speech
# does, or at its length.
EOS_TOKENS = ("<eos>", "!\u201d", "?\u201d", ".\u201d")


def prompt_texts(count: int) -> list[str]:
    """Returns `count` prompts; each time round they lose their last word, as long as two remain."""
    texts = []
    for index in range(count):
        times_round, choice = divmod(index, len(PROMPTS))
        words = PROMPTS[choice].split(" ")
        num_words = len(words) - times_round % (len(words) - 1)
        texts.append(" ".join(words[:num_words]))
    return texts


def eos_token_ids(tokenizer: Any) -> list[int]:
    """Returns the ids of EOS_TOKENS."""
    return [tokenizer.token_to_id[token] for token in EOS_TOKENS]


class TextStream:
    """Turns the token ids of one request into text as they come.

    The tokenizer merges characters, never bytes, so a token is always whole characters and the
    text of a sequence is the texts of its parts: nothing has to be held back.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Appends tokens; returns the text that they add."""
        added: str = self._tokenizer.decode(list(token_ids))
        self.text += added
        return added
