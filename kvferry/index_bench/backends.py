"""Two HTTP backends that answer at once, for other projects' routers to stand before.

`python -m kvferry.index_bench.backends` prints a line of JSON, their URLs, and ends when its input
does. They answer whatever a router asks of a vLLM or SGLang server before it sends anything there.
"""

import asyncio
import json
import sys

MODEL = "checksum"
COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": MODEL,
    "choices": [{"index": 0, "text": "A", "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
KNOWN = {
    "/v1/completions": COMPLETION,
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]},
    "/get_model_info": {"model_path": MODEL, "is_generation": True},
    "/model_info": {"model_path": MODEL, "is_generation": True},
    "/get_server_info": {"model_path": MODEL, "served_model_name": MODEL},
    "/server_info": {"model_path": MODEL, "served_model_name": MODEL},
}


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            path = head.split(" ", 2)[1].partition("?")[0]
            for line in head.split("\r\n")[1:]:
                name, _, value = line.partition(":")
                if name.lower() == "content-length":
                    await reader.readexactly(int(value))
            body = json.dumps(KNOWN.get(path, {})).encode()
            start = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            writer.write(f"{start}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    servers = [await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20) for _ in "12"]
    ports = [each.sockets[0].getsockname()[1] for each in servers]
    print(json.dumps({"urls": [f"http://127.0.0.1:{port}" for port in ports]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
