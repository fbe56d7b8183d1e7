"""OpenAI's batch API: `/v1/files` and `/v1/batches`, kept in the folder `--batch-dir`."""
