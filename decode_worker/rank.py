"""One rank above 0 of a decode group: `python -m decode_worker.rank`, started by rank 0."""

from decode_worker.side import DECODE
from worker.follower import follow

if __name__ == "__main__":
    follow(DECODE)
