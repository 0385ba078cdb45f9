"""The parent of the server's processes: starts, watches, replaces and stops them. No process imports this package.

launch.py             runs one server, from opening its sockets to its exit code
exit_codes.py         the exit codes
process_table.py      the running processes, and the order in which they start
child_process.py      one process: start or fork, watch, stop, kill
heartbeats.py         finds processes that did not answer in time
replacement.py        replaces a process that died while serving
crash_count.py        limits how often processes may die
succession.py         starts the next server during an upgrade and hands the sockets over to it
reload.py             the command `moeserve reload`, which requests an upgrade
systemd.py            messages to systemd
signal_events.py      signals as events of a poll loop
runtime_directory.py  creates the private directory of the server's sockets; removes those of killed servers
launched_config.py    writes the configuration that the processes read

`zygote/` is the process from which routers and detokenizers are forked. `moeserve.processes` holds what the launcher
and its children share. `moeserve.remote` uses this package for a worker on another machine.
"""
