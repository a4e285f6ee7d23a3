"""Arithmetic modulo three primes of up to 59 bits on numpy arrays, in 64-bit words only.

The primes form a tower: each divides the next one minus 1, so that the group of the next has a subgroup of
the order of the one before, on which `exp` can be an exact homomorphism.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from tilewright.tuning.thresholds import INTERPRETER

Words = NDArray[np.uint64]

P0 = 4503599627370353
P1 = 6 * P0 + 1
P2 = 12 * P1 + 1
PRIMES = (P0, P1, P2)
COFACTORS = (6, 12)
"""The subgroup of order PRIMES[i] has this index in the group modulo PRIMES[i + 1]."""

LOST = np.uint64(2**64 - 1)
"""A residue that is not known any more."""

_MODULI = np.array(PRIMES, np.uint64)
_SHIFT = np.uint64(30)
_LOW = np.uint64((1 << 30) - 1)


@cache
def generator(level: int) -> int:
    """An element of order PRIMES[level] modulo PRIMES[level + 1]: the image of 1 under exp."""
    prime, index = PRIMES[level + 1], COFACTORS[level]
    return next(g for h in range(2, 100) if (g := pow(h, index, prime)) != 1)


def moduli(word: int | None = None) -> Words:
    """The prime of one word, or all three along a last axis."""
    return _MODULI if word is None else _MODULI[word]


def add(a: Words, b: Words, p: Words) -> Words:
    """a + b mod p."""
    total = a + b
    return total - np.where(total >= p, p, np.uint64(0))


def negate(a: Words, p: Words) -> Words:
    """-a mod p."""
    return np.where(a == 0, a, p - a)


def multiply(a: Words, b: Words, p: Words) -> Words:
    """a * b mod p, in two steps of 30 bits."""
    high = _by_small(_by_small(a, b >> _SHIFT, p), np.uint64(1 << 30), p)
    return add(high, _by_small(a, b & _LOW, p), p)


def _by_small(a: Words, b: Words | np.uint64, p: Words) -> Words:
    """a * b mod p for b <= 2^30: the quotient fits a float64, so it is right up to one."""
    quotient = np.floor(a.astype(np.float64) * np.float64(b) / p.astype(np.float64)).astype(np.uint64)
    with np.errstate(over="ignore"):
        rest = (a * b - quotient * p).view(np.int64)
    signed = p.astype(np.int64)
    rest = np.where(rest < 0, rest + signed, rest)
    return np.where(rest >= signed, rest - signed, rest).view(np.uint64)


def power(base: Words, exponent: Words, word: int) -> Words:
    """base ** exponent mod PRIMES[word]."""
    p = moduli(word)
    base, exponent = np.broadcast_arrays(base, exponent)
    if base.size <= INTERPRETER.max_python_power_elements:
        prime = PRIMES[word]
        flat = [
            pow(b, e, prime) for b, e in zip(base.ravel().tolist(), exponent.ravel().tolist(), strict=True)
        ]
        return np.array(flat, np.uint64).reshape(base.shape)
    result = np.ones(base.shape, np.uint64)
    while exponent.any():
        result = np.where(exponent & np.uint64(1), multiply(result, base, p), result)
        base, exponent = multiply(base, base, p), exponent >> np.uint64(1)
    return result


def inverse(a: Words, word: int) -> Words:
    """a ** -1 mod PRIMES[word]; 0 for 0."""
    return power(a, np.full(a.shape, PRIMES[word] - 2, np.uint64), word)


@cache
def _digit_powers(level: int) -> Words:
    """table[k, d] = generator ** (d * 256**k), modulo the prime of the next level."""
    prime, g = PRIMES[level + 1], generator(level)
    rows = [[pow(g, d << (8 * k), prime) for d in range(256)] for k in range(7 if level == 0 else 8)]
    return np.array(rows, np.uint64)


def exponential(t: Words, level: int) -> Words:
    """generator(level) ** t modulo PRIMES[level + 1], for t modulo PRIMES[level]."""
    table, p = _digit_powers(level), moduli(level + 1)
    result = np.ones(t.shape, np.uint64)
    for k in range(len(table)):
        digit = ((t >> np.uint64(8 * k)) & np.uint64(255)).astype(np.int64)
        result = multiply(result, table[k][digit], p)
    return result


def hashed(t: Words, p: Words, seed: int) -> Words:
    """A fixed scrambling of t (splitmix64) below p."""
    with np.errstate(over="ignore"):
        z = t + np.uint64(seed & (2**64 - 1))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) % p
