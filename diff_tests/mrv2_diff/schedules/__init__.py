"""Random schedules: what happens to requests, as data, played through vLLM's own scheduler.

`actions` is what can happen and how it is kept in a file, `generator` draws it from a seed,
`scheduled` plays it with HashLM behind the runner, `shrinking` makes a failing one short, `soak`
goes on until its time is over.
"""
