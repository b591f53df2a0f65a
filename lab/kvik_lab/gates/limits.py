"""Every threshold of the gates, with where it comes from."""

from __future__ import annotations

HIT_SHARE = 0.005
"""V1. Hits that were not designed, as a share of prompt tokens, up to which a run is suspect and not
invalid: one request of 200 that is a repeat. Prompts with a prefix of their own have none at all."""

DESIGNED_NEAR, DESIGNED_FAR = 0.05, 0.15
"""V1. How far designed hits may be from the stated share: caches hold whole blocks, and the first request of
a group misses. Beyond the first a run is suspect, beyond the second invalid."""

BYTES_NEAR, BYTES_FAR = 0.02, 0.10
"""V2. Relative difference of the bytes moved from tokens * bytes a token, beyond whole blocks. 2 % leaves
room for what connectors count beside pages; 10 % is less than any other KV type, head count or layer count
changes."""

COMPUTED_FAR = 0.05
"""V3. Share of prompt tokens that a decode engine may compute, beyond one block a request, before the run is
invalid: 5 % of a prefill is below the differences that studies look for, and is seen as suspect."""

FLOOR_SLACK = 0.01
"""V5. A floor is arithmetic on a data sheet's figures, which are rounded to three digits."""

LENGTH = 0.01
"""V6. Relative difference of prompt lengths, stated and counted: text of natural words that was corrected by
a tokenizer's count is within 0.7 % of what was asked for."""

MESSAGES = 0.01
"""V6. Share of an answer's tokens that may have had no message of their own where messages are what was
timed: a time a token is then as far off."""

TRANSPORT_SHARE = 0.98
"""V7. Share of KV bytes that has to have gone over the stated transport; the rest is for a link that was
opened another way before the stated one was up."""

DEVICE_LOW, DEVICE_HIGH = 0.95, 2.0
"""V7. Bytes of the stated devices over the KV's. Below, it went elsewhere; above, something else used
them."""

CLIENT_CPU, CLIENT_CPU_FULL = 0.80, 0.95
"""V9. CPU time of the client over wall time: a loop on one core queues its own events beyond this."""

CLIENT_LAG = 0.010
"""V9. Seconds that the client's loop may run late: more is seen in the times of tokens."""

OTHERS_CPU = 0.10
"""V9. Share of all CPUs of a node that others than the run's processes may use."""

CLOCK_STEP = 0.001
"""V9. Seconds by which a wall clock may go otherwise than the monotonic one, beside slewing; and by which
the clocks of nodes may differ where their stamps are compared."""

CLOCK_SLEW = 500e-6
"""V9. Seconds a second by which adjtime and NTP may slew a clock (Linux' limit, 500 ppm: adjtimex(2))."""
