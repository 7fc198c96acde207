"""Others' clients, unchanged; run by the Python of an environment that has them.

Arguments: the server's URL, a token that may predict. Prints a JSON object: client → what it
returned.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import cohere
import openai
from huggingface_hub import InferenceClient
from langchain_community.document_compressors import jina_rerank
from langchain_core.documents import Document
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings

URL, TOKEN = sys.argv[1:]
TEXTS = ["a good film", "the book was not as good as the film", "long and dull"]
QUERY = "a film"
os.environ.pop("HF_TOKEN", None)


def with_openai() -> Any:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=TOKEN, max_retries=0)
    found = client.embeddings.create(model="encoder", input=TEXTS)  # as base64, without a word
    floats = client.embeddings.create(model="encoder", input=TEXTS, encoding_format="float")
    for one, other in zip(found.data, floats.data, strict=True):
        pairs = zip(one.embedding, other.embedding, strict=True)
        assert max(abs(a - b) for a, b in pairs) < 1e-7
    assert found.usage.total_tokens == floats.usage.prompt_tokens > 9
    assert {"encoder", "scorer"} <= {each.id for each in client.models.list()}
    assert client.models.retrieve("encoder").object == "model"
    try:
        client.embeddings.create(model="encoder", input="film " * 100)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error
    else:
        raise AssertionError("a text that is too long")
    try:
        client.embeddings.create(model="nothing", input="film")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
    return [each.embedding for each in found.data]


def with_langchain_openai() -> Any:
    model = OpenAIEmbeddings(
        model="encoder", base_url=f"{URL}/v1", api_key=TOKEN, check_embedding_ctx_length=False
    )
    assert model.embed_query(TEXTS[0]) == model.embed_documents(TEXTS)[0]
    return model.embed_documents(TEXTS)


def with_langchain_huggingface() -> Any:
    model = HuggingFaceEndpointEmbeddings(model="encoder")
    # It takes no URL since 1.2; what it asks may be given one.
    model.client = InferenceClient(model=f"{URL}/tei/encoder", token=TOKEN)
    return model.embed_documents(TEXTS)


def with_huggingface_hub() -> Any:
    client = InferenceClient(model=f"{URL}/embed", token=TOKEN)
    cut = client.feature_extraction("film " * 100, truncate=True, normalize=True)
    assert cut.shape == (1, 16), cut.shape
    return client.feature_extraction(TEXTS).tolist()


def with_cohere() -> Any:
    found = cohere.ClientV2(TOKEN, base_url=URL).rerank(
        model="scorer", query=QUERY, documents=TEXTS
    )
    return [[each.index, each.relevance_score] for each in found.results]


def with_cohere_v1() -> Any:
    found = cohere.Client(TOKEN, base_url=URL).rerank(
        model="scorer", query=QUERY, documents=TEXTS, top_n=2, return_documents=True
    )
    assert [each.document.text for each in found.results if each.document] == [
        TEXTS[each.index] for each in found.results
    ]
    return [[each.index, each.relevance_score] for each in found.results]


def with_langchain_jina() -> Any:
    compressor = jina_rerank.JinaRerank(model="scorer", jina_api_key=TOKEN, top_n=3)
    jina_rerank.JINA_API_URL = f"{URL}/v1/rerank"  # which nothing else sets
    found = compressor.compress_documents([Document(page_content=each) for each in TEXTS], QUERY)
    return [[TEXTS.index(each.page_content), each.metadata["relevance_score"]] for each in found]


CLIENTS: dict[str, Callable[[], Any]] = {
    name.removeprefix("with_"): value for name, value in vars().items() if name.startswith("with_")
}

if __name__ == "__main__":
    results = {}
    for name, ask in CLIENTS.items():
        try:
            results[name] = ask()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(results))
