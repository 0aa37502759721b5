"""Byte-pair encoding (Sennrich et al. 2016) of characters, learned from the training text alone.

A sentence is cut into words with the blank in front of them and runs of punctuation; pieces never cross these
borders, and putting them together again gives the sentence back.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

PAD, BEGIN, END, UNKNOWN = range(4)
SPECIALS = ("<pad>", "<begin>", "<end>", "<unk>")
_UNITS = re.compile(r" ?\w+| ?[^\w\s]+")

Pair = tuple[str, str]


def units(sentence: str) -> list[str]:
    """The parts of a sentence inside which pieces are merged: " A", " dog", ",", " big", "." ..."""
    return _UNITS.findall(" " + " ".join(sentence.split()))


class Subwords:
    """Sentences to numbers and back; `num_pieces` in all, special ones included."""

    def __init__(self, sentences: Iterable[str], num_pieces: int) -> None:
        counts = Counter(unit for sentence in sentences for unit in units(sentence))
        characters = sorted({character for unit in counts for character in unit})
        merges = learn(
            {unit: count for unit, count in counts.items() if count > 1}, num_pieces - len(SPECIALS) - len(characters)
        )
        self.rank = {pair: place for place, pair in enumerate(merges)}
        self.pieces = [*SPECIALS, *characters, *dict.fromkeys(left + right for left, right in merges)]
        self.number = {piece: number for number, piece in enumerate(self.pieces)}
        self._known: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, sentence: str) -> list[int]:
        """The numbers of a sentence's pieces; a character that the training text does not have is UNKNOWN."""
        return [number for unit in units(sentence) for number in self._encode_unit(unit)]

    def decode(self, numbers: Sequence[int]) -> str:
        """The sentence of pieces up to the first END; special pieces leave no trace."""
        kept = list(numbers[: numbers.index(END)] if END in numbers else numbers)
        return "".join(self.pieces[number] for number in kept if number >= len(SPECIALS)).strip()

    def _encode_unit(self, unit: str) -> list[int]:
        if unit not in self._known:
            symbols = list(unit)
            while len(symbols) > 1:
                first = min(pairwise(symbols), key=lambda pair: self.rank.get(pair, len(self.rank)))
                if first not in self.rank:
                    break
                symbols = _merged(symbols, first)
            self._known[unit] = [self.number.get(symbol, UNKNOWN) for symbol in symbols]
        return self._known[unit]


def learn(counts: Mapping[str, int], num_merges: int) -> list[Pair]:
    """The most frequent pair of neighbours, merged, again and again; ties go to the smaller pair of strings."""
    words = [(list(unit), count) for unit, count in counts.items()]
    frequency: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)  # the words that have, or once had, a pair
    for place, (symbols, count) in enumerate(words):
        for pair in pairwise(symbols):
            frequency[pair] += count
            places[pair].add(place)
    heap = [(-count, pair) for pair, count in frequency.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    while heap and len(merges) < num_merges:
        negative, best = heapq.heappop(heap)
        if frequency[best] != -negative:  # an old entry: the pair's frequency has changed since
            continue
        if negative > -2:
            break
        merges.append(best)
        changed: set[Pair] = set()
        for place in places.pop(best):
            symbols, count = words[place]
            after = _merged(symbols, best)
            if len(after) == len(symbols):
                continue
            for pair in pairwise(symbols):
                frequency[pair] -= count
                changed.add(pair)
            for pair in pairwise(after):
                frequency[pair] += count
                places[pair].add(place)
                changed.add(pair)
            words[place] = (after, count)
        for pair in changed - {best}:
            heapq.heappush(heap, (-frequency[pair], pair))
    return merges


def _merged(symbols: list[str], pair: Pair) -> list[str]:
    """The symbols with every occurrence of the pair made one, from the left."""
    merged: list[str] = []
    at = 0
    while at < len(symbols):
        if at + 1 < len(symbols) and (symbols[at], symbols[at + 1]) == pair:
            merged.append(symbols[at] + symbols[at + 1])
            at += 2
        else:
            merged.append(symbols[at])
            at += 1
    return merged
