"""The parent of a server's processes: starts, watches, replaces and stops them. No process imports it.

launch.py             the life of one server, from its sockets to its exit code
exit_codes.py         how it can end
process_table.py      which processes there are, and in which order they start
child_process.py      one of them: started or forked, watched, stopped, killed
heartbeats.py         who has not answered in time
replacement.py        a process that died while serving gets a successor
crash_count.py        how often one may die
succession.py         the next server beside this one, which hands over its sockets
reload.py             the command that asks for it
systemd.py            what systemd is told
signal_events.py      signals as an event of a poll loop
runtime_directory.py  where a server's sockets lie, and what a killed one has left
launched_config.py    writes the configuration that the processes read

`zygote/` is the process from which routers and detokenizers are forked. `moeserve.processes` holds what the parent and
its children share. `moeserve.remote` uses these rooms for a worker on another machine.
"""
