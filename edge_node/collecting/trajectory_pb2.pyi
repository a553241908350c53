from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Trajectory(_message.Message):
    __slots__ = ("id", "request_id", "choice_index", "task_id", "run_id", "user_pseudonym", "conversation_id", "collected_at_s", "key_id", "model_version", "adapter_digest", "arm", "base_digest", "messages", "prompt_token_ids", "completion_token_ids", "logprobs", "assistant_mask", "sampling", "timings", "finish_reason", "error", "selection", "feedback", "rewards", "redactions", "committed_at_s")
    class RedactionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    USER_PSEUDONYM_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    COLLECTED_AT_S_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ASSISTANT_MASK_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    REDACTIONS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    choice_index: int
    task_id: str
    run_id: str
    user_pseudonym: bytes
    conversation_id: str
    collected_at_s: float
    key_id: str
    model_version: str
    adapter_digest: str
    arm: str
    base_digest: str
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    completion_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    assistant_mask: _containers.RepeatedScalarFieldContainer[bool]
    sampling: Sampling
    timings: Timings
    finish_reason: str
    error: str
    selection: Selection
    feedback: _containers.RepeatedCompositeFieldContainer[Feedback]
    rewards: _containers.RepeatedCompositeFieldContainer[Reward]
    redactions: _containers.ScalarMap[str, int]
    committed_at_s: float
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., choice_index: _Optional[int] = ..., task_id: _Optional[str] = ..., run_id: _Optional[str] = ..., user_pseudonym: _Optional[bytes] = ..., conversation_id: _Optional[str] = ..., collected_at_s: _Optional[float] = ..., key_id: _Optional[str] = ..., model_version: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., arm: _Optional[str] = ..., base_digest: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., completion_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., assistant_mask: _Optional[_Iterable[bool]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., finish_reason: _Optional[str] = ..., error: _Optional[str] = ..., selection: _Optional[_Union[Selection, _Mapping]] = ..., feedback: _Optional[_Iterable[_Union[Feedback, _Mapping]]] = ..., rewards: _Optional[_Iterable[_Union[Reward, _Mapping]]] = ..., redactions: _Optional[_Mapping[str, int]] = ..., committed_at_s: _Optional[float] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_call_id: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments", "result", "duration_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    result: str
    duration_s: float
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ..., result: _Optional[str] = ..., duration_s: _Optional[float] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "max_tokens", "seed", "top_k", "biased", "constrained")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    BIASED_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    top_k: int
    biased: bool
    constrained: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., top_k: _Optional[int] = ..., biased: _Optional[bool] = ..., constrained: _Optional[bool] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("wait_s", "first_token_s", "decode_s")
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    wait_s: float
    first_token_s: float
    decode_s: float
    def __init__(self, wait_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class Selection(_message.Message):
    __slots__ = ("accepted", "reason", "labels", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, accepted: _Optional[bool] = ..., reason: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Feedback(_message.Message):
    __slots__ = ("received_at_s", "rating", "text", "edited_text", "picked_over", "implicit")
    class ImplicitEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RECEIVED_AT_S_FIELD_NUMBER: _ClassVar[int]
    RATING_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    EDITED_TEXT_FIELD_NUMBER: _ClassVar[int]
    PICKED_OVER_FIELD_NUMBER: _ClassVar[int]
    IMPLICIT_FIELD_NUMBER: _ClassVar[int]
    received_at_s: float
    rating: float
    text: str
    edited_text: str
    picked_over: str
    implicit: _containers.ScalarMap[str, float]
    def __init__(self, received_at_s: _Optional[float] = ..., rating: _Optional[float] = ..., text: _Optional[str] = ..., edited_text: _Optional[str] = ..., picked_over: _Optional[str] = ..., implicit: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Reward(_message.Message):
    __slots__ = ("source", "value")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    source: str
    value: float
    def __init__(self, source: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
