"""Calling an API that allows ten calls a minute: the throttle stays within that limit. If the API still answers 429
(other clients call it, too), all runs of the trigger wait as long as it asks for.

    tidegate dev examples/limited_api.py
    for i in $(seq 25); do tidegate publish contact.changed --source crm --data "{\"id\": $i}"; done
    tidegate retries list --kind deliveries
"""

import math
import time
from collections.abc import Callable

from tidegate import Context, Retry, RetryAfter, Tidegate

app = Tidegate()


class Api:
    """Simulates the service: `limit` calls in each minute, then 429 with the seconds to wait."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.now: Callable[[], float] = time.time
        self.calls: list[float] = []
        self.refused = 0
        self.contacts: set[int] = set()

    def put(self, contact: int) -> tuple[int, int]:
        """Return the status, and for 429 the seconds of its Retry-After."""
        now = self.now()
        recent = [at for at in self.calls if at > now - 60]
        if len(recent) >= self.limit:
            self.refused += 1
            return 429, max(1, math.ceil(recent[0] + 60 - now))
        self.calls.append(now)
        self.contacts.add(contact)
        return 200, 0


api = Api(limit=10)


def put(contact: int) -> str:
    """A step: the response of the service decides whether and when it is retried."""
    status, seconds = api.put(contact)
    if status == 429:
        # Applies to the whole trigger: no run of this workflow calls the service before then.
        raise RetryAfter(seconds, "429 Too Many Requests", everyone="trigger")
    return f"contact {contact} is up to date"


@app.workflow(on="contact.changed", throttle="10/min", max_concurrency=3)
async def sync(ctx: Context, id: int) -> str:
    """At most ten launches in any minute and three at a time, across all workers; the others wait, in order."""
    return await ctx.step("put", put, id, retry=Retry(max_attempts=20, base="5s", cap="5m"), timeout="10s")
