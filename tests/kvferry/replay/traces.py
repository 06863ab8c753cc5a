"""Small workloads of our own."""

import json
import random
from pathlib import Path


def write_conversations(path: Path, *, sessions: int = 40, turns: int = 5, seed: int = 1) -> Path:
    """Sessions that share a first block and grow by one to four blocks a turn, as hash ids."""
    rng = random.Random(seed)
    lines, fresh = [], iter(range(1, 10**6))
    for _ in range(sessions):
        at_ms, ids = rng.randrange(60_000), [0]
        for _ in range(turns):
            ids = ids + [next(fresh) for _ in range(rng.randrange(1, 5))]
            length = len(ids) * 512 - rng.randrange(512)
            lines.append(
                {
                    "timestamp": at_ms,
                    "input_length": length,
                    "output_length": rng.randrange(1, 200),
                    "hash_ids": ids,
                }
            )
            at_ms += rng.randrange(2_000, 20_000)
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path
