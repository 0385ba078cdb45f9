"""Several models behind one port: the front process, and the launchers of the models' servers.

launch.py          the launcher: owns the sockets, starts the front process, and starts it again if it crashes
server.py          the front process: listens, and drains at its end
app.py             its application: who may ask, and which request goes where
requested_model.py which model a request is for
relay.py           passes a request to its model's server, and the answer back
early_answer.py    what a request gets while its model is loaded
lists.py           the lists of models, and their loading and unloading by request
probes.py          health and metrics
downloaded.py      the models that clients download and delete
adapters.py        LoRA adapters that clients load and unload
pool.py            the models as requests see them: found, waited for, leased
line_lease.py      lines of batches lease models behind all requests
batch_lines.py     passes a line of a batch to its model's server
models_lock.py     one front at a time has models in memory
lives.py           starts and stops the models' servers
pooled_model.py    the front's record of one model
schedule.py        which model is loaded next, and which makes room for it; pure
memory.py          bytes of RAM and of GPU memory
needs.py           asks a process what models need (`moeserve.cli.models.model_needs`)
instance.py        one model's server: started, asked for its progress, stopped
model_launcher.py  the launcher process of that server
config.py          the models and their common options, as JSON

Each model has a whole server of its own, which listens on a Unix socket in the front's private directory.
"""
