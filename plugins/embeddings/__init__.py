"""Vectors and scores of texts, as clients of OpenAI, text-embeddings-inference and Cohere ask."""
