"""The sampling parameters, declared once (`parameters.py`), and the order in which samplers run (`order.py`).

Everything that knows a parameter follows from its declaration: the fields of every API's bodies, the message on the
wire, the server's defaults, the device's columns, the reference page.
"""
