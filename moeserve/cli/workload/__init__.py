"""Creates requests to a server and evaluates the answers.

`bench serve`, which asks a real server, and `simulate`, which asks the scheduler in virtual time, share it: equal
options and seeds give equal requests, and figures are computed in the same way.
"""
