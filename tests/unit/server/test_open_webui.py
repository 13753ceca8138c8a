"""What Open WebUI sends, in its order: the list of models, a streamed chat, then small tasks about the chat."""

from __future__ import annotations

import httpx

from onekernel.server.settings import ServerSettings
from tests.unit.server.conftest import Start
from tests.unit.server.test_chat import events


def test_the_requests_of_open_webui(scripted: Start) -> None:
    key = "sk-local"
    server = scripted("Paris.", settings=ServerSettings(api_key=key, model_names=("smol",)))
    with httpx.Client(base_url=f"{server.address}/v1/", headers={"Authorization": f"Bearer {key}"}) as front:
        # It checks the connection and reads the names of the models.
        models = front.get("models").json()
        assert models["object"] == "list"
        assert [model["id"] for model in models["data"]] == ["smol"]
        assert all(isinstance(model["created"], int) and model["owned_by"] for model in models["data"])

        # A turn, with all that its settings can hold, and names of its own.
        first = {
            "model": "smol",
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [
                {"role": "system", "content": "Answer briefly."},
                {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
            ],
            "temperature": 0.8,
            "top_p": 0.9,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "seed": 42,
            "stop": ["</s>"],
            "max_tokens": 128,
            "logit_bias": {},
            "reasoning_effort": "medium",
            "response_format": {"type": "text"},
            "metadata": {"chat_id": "x"},
            "user": {"name": "me", "id": "1", "email": "me@example.com", "role": "admin"},
            "chat_id": "c",
            "session_id": "s",
        }
        told = events(front.post("chat/completions", json=first))
        text = "".join(choice["delta"].get("content", "") for one in told for choice in one["choices"])
        assert text == "Paris."
        assert told[-1]["usage"]["total_tokens"] > 0

        # The answer goes back as history, and a title, tags and follow-up questions are asked for, not streamed.
        history = [*first["messages"], {"role": "assistant", "content": text}]  # type: ignore[misc]
        following = [*history, {"role": "user", "content": "And of Italy?"}]
        assert events(front.post("chat/completions", json={**first, "messages": following}))
        for task in ("Make a title as JSON.", "Make tags.", "Suggest follow-ups."):
            body = {
                "model": "smol",
                "messages": [{"role": "user", "content": f"### Task:\n{task}\n<chat_history>...</chat_history>"}],
                "stream": False,
                "max_completion_tokens": 1000,
                "metadata": {"task": "title_generation", "task_body": {}},
            }
            told_whole = front.post("chat/completions", json=body).json()
            assert told_whole["choices"][0]["message"] == {"role": "assistant", "content": "Paris.", "refusal": None}
            assert told_whole["choices"][0]["finish_reason"] == "stop"

        # The user presses stop: the connection is closed, and the next chat works.
        server.backend.endless = True
        with front.stream("POST", "chat/completions", json=first) as running:
            next(running.iter_lines())
        server.backend.endless = False
        assert events(front.post("chat/completions", json=first))
