"""The reference load driver: what it sends is stated, and when it was to be sent is what latency counts from.

`spec` is the file that states a load, `arrivals` when requests are due, `prompts` what is in them, `http` and
`answer` one exchange, `drive` all of them, `search` the highest rate that holds goals.
"""
