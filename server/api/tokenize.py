"""POST /tokenize and /detokenize: text and ids, without generating."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from server.api.chat_completions import encode_messages
from server.context import ServerContext, get_context
from server.errors import InvalidRequestError
from server.fields import REFUSED_IN_TOKENIZE, ignored_fields, ignored_header
from server.respond import check_token_ids, off_loop
from server.schemas.chat_completions import ChatCompletionBody
from server.schemas.tokenize import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody
from server.template_options import checked_kwargs, prompt_end
from server.tool_use import tool_use

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """Count and show the tokens of a prompt or of messages."""
    ignored = ignored_fields(body, REFUSED_IN_TOKENIZE, strict=context.settings.strict_params)
    context.check_model(body.model)
    tokenizer = context.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens is for prompt; a chat template adds its own", param="add_special_tokens"
            )
        use = tool_use(ChatCompletionBody(messages=body.messages, tools=body.tools))
        variables = {**checked_kwargs(body.chat_template_kwargs), **({"tools": use.shown} if use else {})}
        end = prompt_end(body.add_generation_prompt, body.continue_final_message, variables)
        token_ids = await encode_messages(context, body.messages, options=end)
    else:
        prompt = body.prompt or ""
        token_ids = await off_loop(len(prompt), tokenizer.encode, prompt, body.add_special_tokens is not False)
    token_strs = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    answer = TokenizeAnswer(len(token_ids), context.engine_info.max_model_len, token_ids, token_strs)
    return Response(msgspec.json.encode(answer), headers=ignored_header(ignored), media_type="application/json")


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """Show the text of token ids."""
    ignored = ignored_fields(body, {}, strict=context.settings.strict_params)
    context.check_model(body.model)
    check_token_ids(body.tokens, context.engine_info, "tokens")
    text = await off_loop(len(body.tokens), context.tokenizer.decode, body.tokens, skip_special_tokens=False)
    answer = msgspec.json.encode(DetokenizeAnswer(text))
    return Response(answer, headers=ignored_header(ignored), media_type="application/json")
