"""The search tool: BM25 over documents of a JSON Lines file."""
