"""The web page over a folder of runs: read-only, local, live. Needs the extra `web` (FastAPI and uvicorn)."""
