"""A consistent copy of a state in host memory: what training waits for when a checkpoint is written beside it.

The copy's memory is kept and used again by the next copy: fresh memory costs several times as much as copying into it
(the pages must be mapped; on CUDA, pinned as well). So a job that saves holds its state once more in host memory.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:  # a second to load, and most jobs have none
    from torch.distributed.device_mesh import DeviceMesh

_Path: TypeAlias = tuple[Any, ...]


class HostCopy:
    """Copies nested states. Only one copy exists at a time: :meth:`take` overwrites what the call before returned."""

    def __init__(self) -> None:
        self._held: dict[_Path, torch.Tensor] = {}
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    def take(self, state: Any) -> Any:
        """The same structure with every tensor copied to the CPU; when this returns the originals may change.

        Of a DTensor this rank's shard is copied (collective the first time, on CUDA). Tensors that share memory (tied
        weights) are copied once. Other mutable values are copied too.
        """
        old, self._held = self._held, {}
        taken = _Taking(old, self._held, self._meshes)
        result = taken.copy(state, ())
        if taken.on_cuda:
            torch.cuda.current_stream().synchronize()
        return result


class _Taking:
    """One call of :meth:`HostCopy.take`."""

    def __init__(
        self,
        old: dict[_Path, torch.Tensor],
        held: dict[_Path, torch.Tensor],
        meshes: dict[DeviceMesh, DeviceMesh],
    ) -> None:
        self.old = old
        self.held = held
        self.meshes = meshes
        self.on_cuda = False
        self._seen: dict[Any, torch.Tensor] = {}

    def copy(self, value: Any, path: _Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), path)
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if isinstance(value, dict):
            twin = copy.copy(value)  # keeps the type and what modules note on their state (``_metadata``)
            twin.clear()
            twin.update((key, self.copy(item, (*path, key))) for key, item in value.items())
            return twin
        if type(value) in (list, tuple):
            return type(value)(self.copy(item, (*path, index)) for index, item in enumerate(value))
        return copy.deepcopy(value)

    def _tensor(self, tensor: torch.Tensor, path: _Path) -> torch.Tensor:
        if hasattr(tensor, "device_mesh"):
            return self._shard(tensor, path)
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and where in self._seen:
            return self._seen[where]
        cuda = tensor.device.type == "cuda"
        twin = self.old.get(path)
        if twin is None or twin.shape != tensor.shape or twin.dtype != tensor.dtype:
            twin = torch.empty_like(tensor, device="cpu", pin_memory=cuda)
        twin.copy_(tensor, non_blocking=cuda)
        self.on_cuda |= cuda
        self.held[path] = self._seen[where] = twin
        return twin

    def _shard(self, tensor: torch.Tensor, path: _Path) -> torch.Tensor:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor

        assert isinstance(tensor, DTensor)
        mesh = tensor.device_mesh
        if mesh.device_type != "cpu":
            if mesh not in self.meshes:
                self.meshes[mesh] = DeviceMesh("cpu", mesh.mesh.cpu(), mesh_dim_names=mesh.mesh_dim_names)
            mesh = self.meshes[mesh]
        local = self._tensor(tensor.to_local(), path)
        shape, stride = tensor.shape, tensor.stride()
        return DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
