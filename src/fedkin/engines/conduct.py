"""How sites have behaved lately, and what follows: pauses that grow, and in the end removal.

A site that answers rubbish, says that it failed, or lets a deadline pass is asked again, but after a pause: a short one
at first, four times as long each time after, up to a minute; who stays silent is paused for as long as it was waited
for. One reply that can be used, and all is forgotten. Only what no honest site sends (`invalid`) leads to removal, and
only many of it in a row: not failures, lost connections or numbers that are not finite, which befall the honest too.
"""

from __future__ import annotations

from dataclasses import dataclass

FACTOR = 4.0
LONGEST = 60.0  # seconds


@dataclass
class SiteConduct:
    """One site's: failures and invalid messages in a row, until when it is not asked, and why."""

    failures: int = 0
    invalid: int = 0
    until: float = 0.0
    reason: str = ""


class ConductRecord:
    """`pause`: seconds after a first failure; `most`: invalid messages in a row before removal, 0: never."""

    def __init__(self, sites: int, pause: float, most: int) -> None:
        self._sites = [SiteConduct() for _ in range(sites)]
        self._pause, self._most = pause, most

    def good(self, site: int) -> None:
        self._sites[site] = SiteConduct()

    def failed(self, site: int, reason: str, now: float, invalid: bool = False, waited: float = 0.0) -> bool:
        """Writes it down; True if that was one invalid message too many. `waited`: seconds that its silence cost."""
        found = self._sites[site]
        found.failures += 1
        found.invalid += invalid
        pause = min(self._pause * FACTOR ** (found.failures - 1), LONGEST)
        if found.failures > 1:
            pause = max(pause, waited * bool(self._pause))
        found.until, found.reason = now + pause, reason
        return bool(self._most) and found.invalid >= self._most

    def paused(self, site: int, now: float) -> str | None:
        """Why a site is not asked now; None: it is."""
        found = self._sites[site]
        if now >= found.until:
            return None
        often = "once" if found.failures == 1 else f"{found.failures} times in a row"
        return f"not asked for another {found.until - now:.0f} s: it failed {often}, last: {found.reason}"
