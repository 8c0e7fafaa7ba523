"""`python -m tests.pods`: build or take images, render an example, run its pods, and delete each in turn."""

import argparse
import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.models import make_model
from tests.pods import drill
from tests.pods.images import build, check_host
from tests.pods.manifests import release_of
from tests.pods.podman import PodmanError, podman
from tests.pods.redis_outside import RedisOutside
from tests.pods.variants import VARIANTS, Variant, make_secrets, render, values_of

USER = 10001


def main() -> int:
    args = _arguments().parse_args()
    trouble = check_host()
    if trouble:
        print(trouble, file=sys.stderr)
        return 2
    try:
        return asyncio.run(_main(args))
    except asyncio.CancelledError:
        print("stopped; all pods are removed", file=sys.stderr)
        return 143
    except (PodmanError, TimeoutError, AssertionError) as fault:
        print(f"FAILED: {fault}", file=sys.stderr)
        return 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.pods", description=__doc__)
    about = "; ".join(f"{name}: {v.about}" for name, v in VARIANTS.items())
    parser.add_argument("variants", nargs="*", help=f"which to run, one after the other ({about})")
    parser.add_argument("--all", action="store_true", help="run every variant")
    parser.add_argument("--build", action="store_true", help="build the images light and cpu first")
    parser.add_argument("--base", help="base image for --build, in place of the Dockerfiles' own")
    parser.add_argument("--build-option", action="append", default=[], help="further option of podman build")
    parser.add_argument("--light", default="localhost/baton/light:0.1.0")
    parser.add_argument("--worker", default="localhost/baton/cpu:0.1.0")
    parser.add_argument("--redis", default="docker.io/library/redis:7.4.2-alpine")
    parser.add_argument("--only", help="components to start, such as ray-head,control,router; no replay then")
    parser.add_argument("--delete", help="pods to delete, by component or name; default: one of each kind")
    parser.add_argument("--keep", type=Path, help="folder for manifests, records and logs, which stays")
    return parser


async def _main(args: argparse.Namespace) -> int:
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    loop.add_signal_handler(signal.SIGTERM, this.cancel)
    if args.build:
        await build(["light", "cpu"], args.base, args.build_option)
    images = {"light": args.light, "worker": args.worker, "redis": args.redis}
    names = list(VARIANTS) if args.all else (args.variants or ["cpu-one-machine"])
    if unknown := set(names) - set(VARIANTS):
        raise PodmanError(f"no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    faults: list[str] = []
    for name in names:
        faults += [f"{name}: {fault}" for fault in await run_variant(VARIANTS[name], name, images, args)]
    print("\n".join(["", *(faults or ["Everything held."])]))
    return 1 if faults else 0


async def run_variant(
    variant: Variant, name: str, images: dict[str, str], args: argparse.Namespace
) -> list[str]:
    """Return what did not hold."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    folder = _new_folder()
    label, third = f"bp{secrets.token_hex(3)}", 16 + secrets.randbelow(200)
    network = f"10.203.{third}"
    say(f"{name}: {variant.about}; files in {folder}")
    try:
        await podman("network", "create", "--disable-dns", "--subnet", f"{network}.0/24", label)
        return await _run(variant, folder, images, args, label, network, say)
    finally:
        await podman("network", "rm", "--force", label, check=False)
        if args.keep:
            shutil.copytree(
                folder,
                args.keep / name,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("claims", "pods", "host"),
            )
        shutil.rmtree(folder, ignore_errors=True)


def _new_folder() -> Path:
    """Containers' users read what is in it."""
    folder = Path(tempfile.mkdtemp(prefix="baton-pods-"))
    folder.chmod(0o755)
    return folder


async def _run(
    variant: Variant,
    folder: Path,
    images: dict[str, str],
    args: argparse.Namespace,
    label: str,
    network: str,
    say: drill.Say,
) -> list[str]:
    models = folder / "claims/models"
    make_model(models / "tiny", variant.kind)
    for path in [models, *models.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    for host in ("var/lib/baton/models", "var/lib/baton/ssd"):
        (folder / "host" / host).mkdir(parents=True)
        os.chown(folder / "host" / host, USER, USER)
    redis = RedisOutside(f"{network}.10", images["redis"], folder, label)
    kept = make_secrets(folder, redis_url=redis.url)
    values = values_of(variant, images)
    if variant.external_redis:
        values = redis.reached_by(values)
    docs = render(variant, values, folder)
    release = release_of(docs, kept.by_name, network=network, outside={redis.HOST: redis.address})
    only = args.only.split(",") if args.only else ()
    ca = kept.router_ca if values.get("router", {}).get("tls", {}).get("existingSecret") else None
    async with (
        redis.running(is_wanted=variant.external_redis),
        drill.running(
            release,
            folder,
            label=label,
            network=label,
            api_key=kept.api_key,
            token=kept.token,
            ca=ca,
            say=say,
            only=only,
        ) as run,
    ):
        return await _drill(run, args, has_workers=not only)


async def _drill(run: drill.Run, args: argparse.Namespace, *, has_workers: bool) -> list[str]:
    took_s = await drill.all_ready(run, but=() if has_workers else ("router",))
    run.say(f"{len(run.pods)} pods: every one ready after {took_s:.1f} s")
    await drill.sign_in_to_dashboard(run)
    if not has_workers:
        for pod in run.pods.values():
            ended = await pod.delete()
            run.say(f"{pod.plan.name}: ended in {ended.took_s:.1f} s with {ended.statuses}")
            if ended.was_killed:
                return [f"{pod.plan.name}: ended by SIGKILL"]
        return []
    await drill.helm_test(run)
    plans = drill.in_turn(run)
    if args.delete:
        asked = args.delete.split(",")
        plans = [
            p
            for p in plans
            if p.name in asked or p.component in asked or p.labels.get("baton.dev/role") in asked
        ]
    findings = [await drill.deleted_under_load(run, plan) for plan in plans]
    await drill.all_ready(run)
    await drill.helm_test(run)
    await drill.sign_in_to_dashboard(run)
    print(drill.table(findings, run), flush=True)
    return drill.faults(run, findings)


if __name__ == "__main__":
    sys.exit(main())
