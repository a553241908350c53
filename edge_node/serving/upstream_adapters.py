"""Adapter versions on a vLLM server: written as PEFT folders, loaded under a name of their own, unloaded when unused.

A name is made of the site and the adapter's digest, so a name never means two
adapters: vLLM caches prompts by adapter name, and an adapter loaded again under an
old name would be answered from the cache of the one before. For the same reason
loading twice is harmless, and a server that lost its adapters in a restart gets them
again.

What a loaded adapter is checked for: (1) its file has the digest that was published,
(2) the server lists the name with our folder. That the server also uses it, and what a
probe asks: (3) it answers differently with the adapter than without.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import httpx2

from common.adapter import Adapter
from common.errors import TransportError, TrustError
from common.identity import sha256_hex
from common.telemetry import log_event

logger = logging.getLogger("headwater.edge")

_PREFIX = "headwater"
_PROBE = "Tell me, in a few words, what you are good at."
_PROBE_TOKENS = 8
_SHOWN_CHARACTERS = 200


class UpstreamAdapter:
    """A version that an upstream server serves under the name `model`; unloaded when nothing refers to it any more."""

    def __init__(self, adapter: Adapter, model: str) -> None:
        self.digest = adapter.digest
        self.model = model
        self.adapter = adapter


class UpstreamAdapters:
    """Loads and unloads; safe to use from several threads.

    Args:
        http: client of the server, with base URL (ending in /v1) and key; closed with this object.
        model: the server's name of the base model.
        folder: where adapters are written.
        folder_there: the same folder as the server sees it.
        loads: whether the server can load adapters at run time.
    """

    def __init__(
        self, http: httpx2.Client, *, site: str, model: str, folder: Path, folder_there: Path, loads: bool
    ) -> None:
        self._http = http
        self._names = f"{_PREFIX}-{site}-"
        self._model = model
        self._folder = folder
        self._there = folder_there
        self._loads = loads
        self._live: dict[str, weakref.ref[UpstreamAdapter]] = {}
        self._lock = threading.Lock()
        self._dropped: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # may be put to while garbage is collected
        self._worker = threading.Thread(target=self._unload_dropped, name="headwater-upstream", daemon=True)
        self._worker.start()

    def load(self, adapter: Adapter) -> UpstreamAdapter:
        """Make a version ready to serve.

        Raises:
            TransportError: the server cannot be reached, or does not take the adapter.
            TrustError: its file, or what the server lists, is not what it was given.
        """
        if not any(adapter.tensors[name].any() for name in adapter.names("B")):
            return UpstreamAdapter(adapter, self._model)  # it changes nothing: the base model serves it
        if not self._loads:
            raise TransportError(
                "the upstream server cannot load adapters, so only the base model is served; "
                'for a vLLM server set engine.upstream.kind = "vllm"'
            )
        name = f"{self._names}{adapter.digest[:16]}"
        with self._lock:
            live = self._live.get(name)
            served = live() if live is not None else None
            if served is not None:
                return served
            self._put(name, adapter)
            served = UpstreamAdapter(adapter, name)
            self._live[name] = weakref.ref(served)
            weakref.finalize(served, self._dropped.put, name).atexit = False
        return served

    def restore(self, served: UpstreamAdapter) -> None:
        """Load a version again that the server no longer knows; raises like `load`."""
        if served.model == self._model:
            return
        with self._lock:
            if self._listed().get(served.model) != str(self._there / served.digest):  # or another request has done it
                self._put(served.model, served.adapter)

    def look_at(self, served: UpstreamAdapter) -> str:
        """Why a version is not served as it was loaded; empty where it is, as far as one can tell from outside.

        Raises:
            TransportError: the server cannot be asked now.
        """
        if served.model == self._model:
            self._answer(self._model)
            return ""
        if self._listed().get(served.model) != str(self._there / served.digest):  # (2)
            self.restore(served)
        with_adapter, without = self._answer(served.model), self._answer(self._model)
        if with_adapter is not None and with_adapter == without:  # (3)
            return "the model server answers with the adapter exactly as without it"
        return ""

    def forget_others(self) -> None:
        """Unload what an earlier run of this site left on the server; nothing happens where it cannot be reached."""
        if not self._loads:
            return
        with self._lock:
            try:
                for name in self._listed():
                    live = self._live.get(name)
                    if self._is_ours(name) and (live is None or live() is None):
                        self._unload(name)
            except TransportError as error:
                log_event(logger, "upstream adapters not listed", reason=str(error))

    def _is_ours(self, name: str) -> bool:
        """Whether this site gave the name; the name of one site may begin with that of another."""
        return re.fullmatch(re.escape(self._names) + "[0-9a-f]{16}", name) is not None

    def close(self) -> None:
        """Stop; what is loaded stays loaded, for the next start."""
        self._dropped.put(None)
        self._worker.join(timeout=5)
        self._http.close()

    # --- on the server

    def _put(self, name: str, adapter: Adapter) -> None:
        folder = self._written(adapter)
        there = str(self._there / folder.name)
        for attempt in range(2):
            response = self._post("load_lora_adapter", {"lora_name": name, "lora_path": there})
            if response.status_code == 200:
                break
            if "already been loaded" not in _said(response) or attempt:
                raise TransportError(_why_not_loaded(response, folder))
            if self._listed().get(name) == there:
                break
            self._unload(name)  # loaded from another place, by an earlier run with other settings
        if self._listed().get(name) != there:  # (2)
            raise TrustError("the upstream server does not list the adapter it was given")

    def _answer(self, model: str) -> Any:
        """A greedy answer with its log-probabilities; None from a server that gives none."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": _PROBE}],
            "temperature": 0,
            "max_tokens": _PROBE_TOKENS,
            "logprobs": True,
            "top_logprobs": 5,
        }
        response = self._post("chat/completions", body)
        if response.status_code != 200:
            raise TransportError(f"the upstream server does not answer with {model}: {_said(response)}")
        try:
            choice = response.json()["choices"][0]
            return (choice["message"]["content"], choice["logprobs"]["content"]) if choice.get("logprobs") else None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TransportError("the upstream server's answer cannot be read") from error

    def _listed(self) -> dict[str, str]:
        """Names the server knows, with where each comes from."""
        try:
            response = self._http.get("models")
            models = response.raise_for_status().json()["data"]
            return {str(m["id"]): str(m.get("root", "")) for m in models}
        except httpx2.HTTPError as error:
            raise TransportError(f"the upstream server cannot be asked: {type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TransportError("the upstream server's list of models cannot be read") from error

    def _unload(self, name: str) -> None:
        """Unload and delete; a name the server does not know is unloaded already."""
        response = self._post("unload_lora_adapter", {"lora_name": name})
        if response.status_code not in (200, 404):
            raise TransportError(f"the upstream server does not unload {name}: {_said(response)}")

    def _post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        try:
            return self._http.post(path, json=body)
        except httpx2.HTTPError as error:
            raise TransportError(f"the upstream server cannot be reached: {type(error).__name__}") from error

    def _unload_dropped(self) -> None:
        while (name := self._dropped.get()) is not None:
            with self._lock:
                live = self._live.get(name)
                if live is not None and live() is not None:
                    continue  # loaded again in the meantime
                self._live.pop(name, None)
                try:
                    self._unload(name)
                except TransportError as error:  # the next start tries again
                    log_event(logger, "upstream adapter not unloaded", reason=str(error))
                    continue
                for folder in self._folder.glob(f"{name.removeprefix(self._names)}*"):
                    shutil.rmtree(folder, ignore_errors=True)

    # --- on disk

    def _written(self, adapter: Adapter) -> Path:
        """The adapter's folder, for the server to read; (1) the file in it has the adapter's digest."""
        folder = self._folder / adapter.digest
        tensors = folder / "adapter_model.safetensors"
        try:
            if not tensors.exists() or sha256_hex(tensors.read_bytes()) != adapter.digest:
                partial = self._folder / f".{adapter.digest}.{os.getpid()}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)
                adapter.write_peft_folder(partial, base_model=self._model)
                for path in (self._folder, partial, *partial.iterdir()):
                    path.chmod(0o755 if path.is_dir() else 0o644)  # adapters are no secret, the server is another user
                partial.rename(folder)
            written = sha256_hex(tensors.read_bytes())
        except OSError as error:
            raise TransportError(f"the adapter cannot be written for the upstream server: {error.strerror}") from error
        if written != adapter.digest:
            raise TrustError(f"{tensors} does not have digest {adapter.digest[:12]}")
        return folder


def _said(response: httpx2.Response) -> str:
    """What an error response says, in short."""
    try:
        error = response.json()
        error = error.get("error", error)
        text = error.get("message", "") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = ""
    return f"{response.status_code} {str(text)[:_SHOWN_CHARACTERS]}".strip()


def _why_not_loaded(response: httpx2.Response, folder: Path) -> str:
    said = _said(response)
    match response.status_code:
        case 401 | 403:
            return "the upstream server refuses this node's key; check engine.upstream.key_file"
        case 404 if "adapter" not in said.lower():
            return (
                "the upstream server has no adapter endpoints; "
                "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        case 404:
            return f"the upstream server cannot read {folder}; set engine.upstream.adapter_folder to a folder both see"
        case _:
            return f"the upstream server did not load the adapter: {said}"
