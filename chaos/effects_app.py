"""An application whose effects are lines of a file, outside the database."""

from __future__ import annotations

import os

from tidegate import Context, Tidegate

app = Tidegate()


@app.workflow(on="chaos.effect")
def effect(ctx: Context, key: str) -> None:
    file = os.open(os.environ["CHAOS_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{key}\n".encode())
    finally:
        os.close(file)
