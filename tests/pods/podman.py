"""Podman's command line: what a container's part of a manifest becomes, and the commands that run it."""

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pods.manifests import PodPlan, Release, environment
from tests.pods.quantities import quantity

CALL_S = 180


class PodmanError(Exception):
    """A command of podman failed; the text is what it printed."""


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


async def call(*args: str, timeout_s: float = CALL_S, check: bool = True) -> Done:
    """Run a command to its end. Raises PodmanError if it fails and `check` is set, TimeoutError if it takes
    longer than that."""
    process = await asyncio.create_subprocess_exec(
        *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except BaseException:
        if process.returncode is None:
            process.kill()
        raise
    done = Done(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))
    if check and done.status:
        raise PodmanError(f"{' '.join(args[:4])} …: {done.err.strip()[-1000:] or done.out.strip()[-1000:]}")
    return done


async def podman(*args: str, timeout_s: float = CALL_S, check: bool = True) -> Done:
    return await call("podman", *args, timeout_s=timeout_s, check=check)


@dataclass(frozen=True)
class Folders:
    """Folders that stand for a node's: those of hosts, of claims, and of each pod's own volumes."""

    root: Path

    def host(self, path: str) -> Path:
        return self.root / "host" / path.lstrip("/")

    def claim(self, name: str) -> Path:
        return self.root / "claims" / name

    def own(self, pod: str, volume: str) -> Path:
        return self.root / "pods" / pod / volume

    def forget(self, pod: str) -> None:
        """The volumes of a pod end with it; claims and folders of hosts stay."""
        shutil.rmtree(self.root / "pods" / pod, ignore_errors=True)


def create_arguments(
    release: Release, pod: PodPlan, container: Mapping[str, Any], folders: Folders
) -> list[str]:
    """Arguments of `podman create` behind its name, with the volumes' folders made."""
    security = {**pod.spec.get("securityContext", {}), **container.get("securityContext", {})}
    capabilities, limits = security.get("capabilities", {}), container.get("resources", {}).get("limits", {})
    args = ["--pull=never", "--user", f"{security.get('runAsUser', 0)}:{security.get('runAsGroup', 0)}"]
    if "fsGroup" in security:
        args += ["--group-add", str(security["fsGroup"])]
    if security.get("readOnlyRootFilesystem"):
        args += ["--read-only", "--read-only-tmpfs=false"]
    args += [f"--cap-drop={one}" for one in capabilities.get("drop", ())]
    args += [f"--cap-add={one}" for one in capabilities.get("add", ())]
    if security.get("allowPrivilegeEscalation") is False:
        args.append("--security-opt=no-new-privileges")
    if "memory" in limits:
        limit = str(int(quantity(limits["memory"])))
        args += ["--memory", limit, "--memory-swap", limit]
    if quantity(limits.get("cpu", 0)):
        args += ["--cpus", str(min(quantity(limits["cpu"]), os.cpu_count() or 1))]
    for name, value in environment(release, pod, container).items():
        args += ["--env", f"{name}={value}"]
    args += [
        part for mount in container.get("volumeMounts", ()) for part in _mount(release, pod, mount, folders)
    ]
    if command := container.get("command"):
        args += ["--entrypoint", json.dumps(command)]
    return [*args, container["image"], *(str(one) for one in container.get("args", ()))]


def _mount(release: Release, pod: PodPlan, mount: Mapping[str, Any], folders: Folders) -> list[str]:
    volumes = {v["name"]: v for v in pod.spec.get("volumes", ())}
    volumes |= {c: {"persistentVolumeClaim": {"claimName": f"{c}-{pod.name}"}} for c in pod.claims}
    volume, at = volumes[mount["name"]], mount["mountPath"]
    if (memory := volume.get("emptyDir")) and memory.get("medium") == "Memory":
        size = f",tmpfs-size={int(quantity(memory['sizeLimit']))}" if "sizeLimit" in memory else ""
        return ["--mount", f"type=tmpfs,destination={at},tmpfs-mode=01777{size}"]
    folder = _folder(release, pod, volume, folders)
    options = ":ro" if mount.get("readOnly") else ""
    return ["--volume", f"{folder / mount.get('subPath', '')}:{at}{options}"]


def _folder(release: Release, pod: PodPlan, volume: Mapping[str, Any], folders: Folders) -> Path:
    group = pod.spec.get("securityContext", {}).get("fsGroup", 0)
    if "hostPath" in volume:
        folder = folders.host(volume["hostPath"]["path"])
        if volume["hostPath"].get("type") == "DirectoryOrCreate":
            folder.mkdir(parents=True, exist_ok=True)
        return folder
    if "persistentVolumeClaim" in volume:
        return _shared(folders.claim(volume["persistentVolumeClaim"]["claimName"]), group)
    if "emptyDir" in volume:
        return _shared(folders.own(pod.name, volume["name"]), group, mode=0o2777)
    if "secret" in volume:
        given, source = release.secrets[volume["secret"]["secretName"]], volume["secret"]
        items = [(i["key"], i["path"]) for i in source.get("items", ())] or [(k, k) for k in given]
        files = {path: given[key] for key, path in items}
    else:
        name = volume["configMap"]["name"]
        files = next(
            d["data"] for d in release.docs if d["kind"] == "ConfigMap" and d["metadata"]["name"] == name
        )
    folder = _shared(folders.own(pod.name, volume["name"]), group)
    for path, text in files.items():
        (folder / path).write_text(text)
        os.chown(folder / path, 0, group)
        (folder / path).chmod(0o440)
    return folder


def _shared(folder: Path, group: int, *, mode: int = 0o2775) -> Path:
    if not folder.exists():
        folder.mkdir(parents=True)
        os.chown(folder, 0, group)
        folder.chmod(mode)
    return folder
