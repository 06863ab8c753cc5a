"""What the log is told of a request when it ends."""

from dataclasses import dataclass

from router.journey import Journey
from router.transcript import Transcript


@dataclass(slots=True)
class Record:
    """What is said of a request when it ends: never its prompt, never its text."""

    door: str
    tenant: str
    request_id: str = ""
    status: str = "cancelled"  # unless it ends in another way, its client has left
    message: str = ""
    journey: Journey | None = None
    transcript: Transcript | None = None

    def fields(self, seconds: float) -> dict[str, object]:
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "door": self.door,
            "tenant": self.tenant,
            "status": self.status,
            "seconds": round(seconds, 4),
        }
        if self.message:
            fields["message"] = self.message
        journey, transcript = self.journey, self.transcript
        if journey is not None and transcript is not None:
            fields |= {
                "prefill": journey.prefill,
                "decode": journey.decode,
                "attempts": journey.attempts,
                "prompt_tokens": journey.prompt_tokens,
                "cached_tokens": journey.spared_tokens,
                "fetched_tokens": journey.fetched_tokens,
                "completion_tokens": transcript.num_tokens,
                "finish_reasons": transcript.finish_reasons,
            }
            if journey.ttft_s is not None:
                fields["ttft_s"] = round(journey.ttft_s, 4)
        return fields
