"""What the parameters tables of docs/api.md say of the routes that other servers have: Ollama's and llama.cpp's."""

from docs.parameters import Routes
from weft.server.apis.llama_cpp.route import REFUSED_IN_LLAMA_CPP, InfillBody, LlamaCppCompletionBody
from weft.server.apis.ollama.body import (
    REFUSED_IN_OLLAMA_CHAT,
    REFUSED_IN_OLLAMA_GENERATE,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from weft.server.task.validation import REFUSED_EVERYWHERE

OLLAMA_ROUTES: Routes = (
    ("/api/chat", OllamaChatBody, REFUSED_IN_OLLAMA_CHAT),
    ("/api/generate", OllamaGenerateBody, REFUSED_IN_OLLAMA_GENERATE),
    ("/api/embed", OllamaEmbedBody, REFUSED_EVERYWHERE),
    ("/api/embeddings", OllamaEmbeddingsBody, REFUSED_EVERYWHERE),
)
OLLAMA_REMARKS = {
    "options": "`num_predict`, `temperature`, `top_k`, `top_p`, `min_p`, `seed`, `stop`, three penalties, and "
    "`num_ctx`, which is cut to the context that there is and reported",
    "stream": "JSON lines, unless false",
    "format": "`json` or a schema; enforced by a grammar",
    "think": "as far as the model can switch it",
    "raw": "leaves out the chat template, and cannot be used with `system` or `think`",
    "suffix": "for vocabularies with tokens for filling in the middle; not with `system` or `think`, either",
    "truncate": "false makes a text that is too long an error",
    "dimensions": "of models with shorter vectors",
    "messages": "without any, the answer is that the model is loaded",
    "keep_alive": "models stay loaded",
}

LLAMA_CPP_ROUTES: Routes = (
    ("/completion", LlamaCppCompletionBody, REFUSED_IN_LLAMA_CPP),
    ("/infill", InfillBody, REFUSED_IN_LLAMA_CPP),
)
LLAMA_CPP_REMARKS = {
    "prompt": "a text or token ids; in /infill the beginning of what is filled in",
    "n_predict": "-1 as many as the context holds, which is also the default",
    "n_probs": "up to 20",
    "logit_bias": "by token id; false never",
    "cache_prompt": "false leaves the prefix cache alone",
    "grammar": "GBNF",
    "input_extra": "stands as plain text in front of the prefix",
    "seed": "-1 is random",
}
