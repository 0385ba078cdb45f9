"""Several models behind one port: the front process, and the launchers of the models' servers.

launch.py          the launcher: owns the sockets, starts the front process, and starts it again if it crashes
server.py          the front process: listens, and drains at its end
app.py             its application: checks requests, and decides which process answers each one
requested_model.py finds the model that a request is for
relay.py           passes a request to its model's server, and the answer back
early_answer.py    the beginning of an answer while its model is loaded
lists.py           the lists of models, and their loading and unloading by request
model_events.py    llama-server's stream of the models' states
probes.py          health and metrics
downloaded.py      the models that clients download and delete
adapters.py        LoRA adapters that clients load and unload
pool.py            the interface for requests: find, await and lease models
line_lease.py      leases models for lines of batches, which come after all requests
batch_lines.py     passes a line of a batch to its model's server
memory_share.py    what earlier fronts of an upgrade still hold of the models' memory
lives.py           starts and stops the models' servers
pooled_model.py    the front's record of one model
schedule.py        decides which model is loaded next, and which makes room for it; pure
memory.py          bytes of RAM and of each GPU's memory
gpus.py            decides which GPUs a model gets; pure
needs.py           asks a process what models need (`moeserve.cli.models.model_needs`)
instance.py        starts and stops one model's server, and asks it for its progress
model_launcher.py  the launcher process of that server
config.py          the models and their common options, as JSON

Each model has a whole server of its own, which listens on a Unix socket in the front's private directory.
"""
