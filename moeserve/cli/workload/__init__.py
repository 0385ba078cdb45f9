"""Requests to a server, and the evaluation of its answers. Shared by `bench serve`, which asks a real server, and
`simulate`, which asks the scheduler in virtual time: the same options and seed are the same requests, and the same
figures are computed from the answers."""
