"""A YAML reader that rejects duplicate keys."""

from __future__ import annotations

from typing import Any

import yaml


def read_yaml(text: bytes) -> Any:
    """Parses one YAML document. Raises ValueError."""
    try:
        return _StrictLoader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Rejects duplicate keys, of which YAML would keep the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len({str(key) for key in keys}) < len(keys):
            raise yaml.constructor.ConstructorError(None, None, "a key is given twice", node.start_mark)
        return dict(super().construct_mapping(node, deep))
