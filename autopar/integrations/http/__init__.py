"""The HTTP server, with OpenAI's API: what `python -m autopar serve` runs on rank 0.

serve           from a model's folder to a server: loads the model on a mesh, and runs until a signal ends it
app             the routes; a client that leaves ends its request
fields, prompts, grammar, asked     a request is read: its fields, its prompt, its JSON schema; all together
generation, text    the choices of a request while they are generated; tokens become text
responses       in the shapes of OpenAI's API
errors          in the shape of OpenAI's API
metrics         for Prometheus
engine          what the server needs of the engine that generates

Needs the extra autopar[serve]: fastapi, uvicorn, openai, prometheus-client, llguidance. Only the command line and user
scripts import this package.
"""
