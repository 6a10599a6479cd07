"""The HTTP server with OpenAI's API that `python -m autopar serve` runs on rank 0.

serve           from a model's folder to a server: loads the model on a mesh, and runs until a signal ends it
app             the routes; a client that disconnects ends its request
parsed_request  from the body of a request to prompts and `Sampling`; it uses fields (names and checks), prompts
                (token ids, chat templates) and grammar (JSON schemas)
generation      the choices of a request while they are generated
responses       the JSON objects of responses and streams
errors          the JSON object of an error
metrics         metrics for Prometheus
engine          the model that is served, and what the server needs of the engine that generates

Needs the extra autopar[serve]: fastapi, uvicorn, openai, prometheus-client, llguidance. Only the command line and user
scripts import this package.
"""
