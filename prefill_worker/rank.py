"""One rank above 0 of a prefill worker: `python -m prefill_worker.rank`, started by rank 0."""

from prefill_worker.side import PREFILL
from worker.follower import follow

if __name__ == "__main__":
    follow(PREFILL)
