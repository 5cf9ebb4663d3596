"""Reads the fields of a body for the chat template: how the prompt ends, and template variables."""

from collections.abc import Mapping

from weft.server.errors import InvalidRequestError, UnsupportedParameterError
from weft.server.schemas.chat_completions import ChatCompletionBody
from weft.server.text.chat_template import TemplateOptions
from weft.server.text.text_tokenizer import TextTokenizer

_OTHER_PARAMETERS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


def prompt_end(
    add_generation_prompt: bool | None, continue_final_message: bool | None, variables: Mapping[str, object]
) -> TemplateOptions:
    """The template options for a prompt end, on any route that renders messages. Variables are passed unchanged.

    Raises:
        InvalidRequestError: Both ways to end the prompt are requested.
    """
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message leaves the last message open, so add_generation_prompt must not be true with it",
            param="continue_final_message",
        )
    return TemplateOptions(
        add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
        continue_final_message=bool(continue_final_message),
        variables=variables,
    )


def template_options(
    body: ChatCompletionBody, tokenizer: TextTokenizer, derived: Mapping[str, object]
) -> TemplateOptions:
    """Read the options of a chat body. `derived` holds variables that come from its other fields.

    Raises:
        InvalidRequestError: See `prompt_end`.
        UnsupportedParameterError: There are documents, but the template does not use them.
    """
    variables = {**derived, **checked_kwargs(body.chat_template_kwargs)}
    if body.documents:
        if "documents" not in tokenizer.template_variables:
            raise UnsupportedParameterError(
                "documents is not supported by this model: its chat template does not name them", param="documents"
            )
        variables["documents"] = body.documents
    if body.verbosity is not None and "verbosity" in tokenizer.template_variables:
        variables["verbosity"] = body.verbosity
    return prompt_end(body.add_generation_prompt, body.continue_final_message, variables)


def checked_kwargs(given: Mapping[str, object] | None) -> Mapping[str, object]:
    """Check the template variables that a caller sets, and return them.

    Raises:
        InvalidRequestError: One of them has a parameter of its own.
    """
    for name in given or ():
        if name in _OTHER_PARAMETERS:
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequestError(f"{param} cannot be set: {name} is a parameter of its own", param=param)
    return given or {}


def honoured_by_template(tokenizer: TextTokenizer) -> frozenset[str]:
    """Names of accepted fields that this template honours."""
    return frozenset({"verbosity", "text.verbosity"} if "verbosity" in tokenizer.template_variables else ())
