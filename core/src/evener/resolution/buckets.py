"""Token buckets: ranges of token counts that share one table entry. They end at powers of two, so that ``bit_length``
finds the bucket of a count."""

from __future__ import annotations

from collections.abc import Iterable

from evener.contracts.ops import Bucket

LEAST_CAPTURED_PROMPT, LARGEST_CAPTURED_PROMPT = 16, 512


def token_buckets(largest: int) -> tuple[Bucket, ...]:
    """``1, 2, 3..4, 5..8, …`` up to the bucket that holds ``largest``, whose upper end is ``largest``."""
    buckets, low, high = [], 1, 1
    while low <= largest:
        buckets.append(Bucket(low, min(high, largest)))
        low, high = high + 1, high * 2
    return tuple(buckets)


def bucket_index(tokens: int) -> int:
    """Index into ``token_buckets`` for a step of ``tokens`` tokens (at least 1)."""
    return (tokens - 1).bit_length()


def merge_buckets(buckets: Iterable[Bucket]) -> list[Bucket]:
    """The same token counts in as few ranges as possible, ascending."""
    ranges: list[Bucket] = []
    for bucket in sorted(set(buckets)):
        if ranges and ranges[-1].high + 1 == bucket.low:
            ranges[-1] = Bucket(ranges[-1].low, bucket.high)
        else:
            ranges.append(bucket)
    return ranges


def capture_sizes(largest: int) -> tuple[int, ...]:
    """Row counts that are captured: upper ends of buckets and, from 16 on, one between each two, so that padding adds
    at most a third."""
    ends = [bucket.high for bucket in token_buckets(largest)]
    return tuple(sorted({*ends, *(3 * end // 2 for end in ends if end >= 16 and 3 * end // 2 < largest)}))


def captured_prompts(largest: int) -> tuple[int, ...]:
    """Token counts of prompts that are captured, up to ``largest``: shorter prompts are padded to the smallest, and
    longer ones take longer to compute than to launch."""
    most = min(largest, LARGEST_CAPTURED_PROMPT)
    return tuple(size for size in capture_sizes(most) if size >= LEAST_CAPTURED_PROMPT or size == most)
