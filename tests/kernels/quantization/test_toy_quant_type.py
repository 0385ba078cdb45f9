"""A new quantization type is one row: with nothing else said, files, sizes, placement and the GPU's kernels have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.config.units import GIB
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.embed.op import embed
from moeserve.kernels.linear.op import linear
from moeserve.kernels.linear.reference import linear as reference
from moeserve.kernels.planes import dequantize, empty_planes, repack
from moeserve.kernels.quantize.reference import quantize, round_trip
from moeserve.kv.layout import KvLayout
from moeserve.models.errors import ModelError
from moeserve.models.loading.ram_experts import load_ram_experts
from moeserve.models.registry import read_checked_shape, read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.models.sources.gguf.dummy import open_dummy, std_of
from moeserve.placement import Gpu, ModelSizes, PlacementOptions, place
from moeserve.placement.sizes import plane_bytes
from moeserve.quantization import BitField, BlockLayout, QuantType, StoredScales, registered
from moeserve.quantization import reference as blocks_reference
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import small_config
from tests.kernels.weights import activations, nmse
from tests.support.models.gguf_bytes import Tensor, gguf_bytes, model_metadata, model_tensors

# 16 bytes of codes in runs of 4, less 3, then a float16 scale.
TOY_LAYOUT = BlockLayout(BitField(0, 4, 4), 32, StoredScales.F16, halves_at=16, offset=3)
NUMBER = 200


@pytest.fixture
def toy() -> Iterator[QuantType]:
    with registered(QuantType("Q4_TOY", NUMBER, 32, 18, TOY_LAYOUT, cpu=False)) as row:
        yield row


def random_rows(rows: int, cols: int) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (rows, cols // 32, 18), np.uint8)
    scales = rng.uniform(-1, 1, (rows, cols // 32, 1)).astype(np.float16)
    blocks[..., 16:] = scales.view(np.uint8).reshape(rows, cols // 32, 2)
    return blocks.reshape(rows, -1)


def values_of(rows: npt.NDArray[np.uint8], cols: int) -> npt.NDArray[np.float32]:
    """By hand, code by code."""
    out = np.empty((len(rows), cols), np.float32)
    for row, column in np.ndindex(out.shape):
        block = rows[row, column // 32 * 18 : column // 32 * 18 + 18]
        run, within = divmod(column % 32, 8)
        byte = int(block[4 * run + within % 4])
        code = byte & 15 if within < 4 else byte >> 4
        out[row, column] = np.float32(block[16:].view(np.float16)[0]) * np.float32(code - 3)
    return out


def toy_model(path: Path) -> Path:
    matrices = [
        Tensor(t.name, t.dims, NUMBER if len(t.dims) > 1 and t.dims[0] % 32 == 0 else t.type)
        for t in model_tensors()
    ]
    path.write_bytes(gguf_bytes(model_metadata(), matrices))
    return path


def test_a_file_is_read(toy: QuantType, tmp_path: Path) -> None:
    rows, path = random_rows(5, 64), tmp_path / "toy.gguf"
    file = gguf_bytes({}, [Tensor("w", (64, 5), NUMBER)])
    padded = rows.tobytes() + bytes(-rows.nbytes % 32)
    path.write_bytes(file[: -len(padded)] + padded)
    opened = open_gguf(path)
    info = opened.tensors["w"]
    assert (info.type, info.shape, info.nbytes) == (toy, (5, 64), 5 * 2 * 18)
    values = blocks_reference.dequantize(info.type, opened.data("w"))
    np.testing.assert_array_equal(values.reshape(5, 64), values_of(rows, 64))


def test_without_its_row_the_file_is_refused(tmp_path: Path) -> None:
    with registered(QuantType("Q4_TOY", NUMBER, 32, 18, TOY_LAYOUT, cpu=False)):
        path = toy_model(tmp_path / "toy.gguf")
    with pytest.raises(ModelError, match=f"type number {NUMBER}, which is not supported; supported are F32"):
        open_gguf(path)


def test_sizes_and_placement(toy: QuantType, tmp_path: Path) -> None:
    gguf = open_gguf(toy_model(tmp_path / "toy.gguf"))
    config = read_checked_shape(gguf)
    for tensor in gguf.tensors.values():
        if tensor.type is toy:
            assert plane_bytes(tensor) == empty_planes(toy, tensor.shape, "meta").nbytes
    sizes = ModelSizes.of(gguf.tensors, KvLayout(config))
    assert sizes.layers[0].expert.cpu == 3 * 32 * 64 // 32 * 18
    placement = place(sizes, PlacementOptions(most_kv_tokens=4096), Gpu(GIB, 0))
    assert [len(layer.gpu_experts) for layer in placement.layers] == [config.num_experts] * config.num_layers


def test_random_weights(toy: QuantType, tmp_path: Path) -> None:
    dummy = open_dummy(toy_model(tmp_path / "toy.gguf"))
    tensor = dummy.tensors["blk.0.ffn_gate_exps.weight"]
    assert tensor.type is toy
    values = blocks_reference.dequantize(toy, dummy.data(tensor.name))
    assert 0.8 < values.std() / std_of(tensor) < 1.25


@pytest.mark.parametrize("cols", [256, 160])
def test_planes_and_kernels(toy: QuantType, cols: int) -> None:
    rows = random_rows(6, cols)
    expected = torch.from_numpy(values_of(rows, cols))
    planes = repack(torch.from_numpy(rows).to(DEVICE), toy, (6, cols))
    assert torch.equal(dequantize(planes, 0).cpu(), expected)
    tensors = [planes.codes, planes.scales, planes.supers]

    x = torch.empty(2, cols, device=DEVICE)
    embed(ints([5, 0]), counter(2), tensors, int(toy), x)
    assert torch.equal(x.cpu(), expected[[5, 0]])

    few, out = activations("gaussian", 1, cols), torch.empty(1, 6, device=DEVICE)
    q = quantize(few)
    taken = (few.to(DEVICE), q.codes.to(DEVICE), q.scales.to(DEVICE))
    linear(*taken, counter(1), tensors, int(toy), None, 0, cols, out)
    assert nmse(out.cpu(), reference(round_trip(few), expected)) < 1e-12

    many, out = activations("gaussian", 20, cols).half(), torch.empty(20, 6, device=DEVICE)
    linear(many.to(DEVICE), None, None, counter(20), tensors, int(toy), None, 0, cols, out)
    assert nmse(out.cpu(), reference(many, expected)) < 1e-7


def test_the_cpu_engine_refuses_it_by_name(toy: QuantType, tmp_path: Path) -> None:
    path = toy_model(tmp_path / "toy.gguf")
    said = r"tensor '[a-z_.0-9]+' is of type Q4_TOY, which the CPU engine does not support; its types are .* MXFP4"
    with pytest.raises(ModelError, match=said):
        load_cpu_runner(small_config(path, threads=1), lambda *_: None)
    file = open_gguf(path)
    shape, device = read_shape(file), torch.device("cpu")
    with pytest.raises(ModelError, match=said):
        load_ram_experts(CpuStream(1), file, shape, [[0, 1], [0]], device, lambda *_: None)
