"""The endings by which models are refused early, compared with all of vLLM's classes."""

from vllm.model_executor.models import registry

from coordinator.protocol.model_support import is_pooling

SERVED = (
    registry._TEXT_GENERATION_MODELS,
    registry._MULTIMODAL_MODELS,
    registry._TRANSFORMERS_SUPPORTED_MODELS,
)
REFUSED = (
    registry._REWARD_MODELS,
    registry._SEQUENCE_CLASSIFICATION_MODELS,
    registry._EMBEDDING_MODELS,
)


def test_no_class_that_makes_text_is_refused_by_its_name() -> None:
    names = [name for models in SERVED for name in models]
    assert len(names) > 200
    assert [name for name in names if is_pooling(name)] == []


def test_classes_of_vectors_and_scores_are_refused_by_their_names() -> None:
    makes_text = {name for models in SERVED for name in models}
    names = {name for models in REFUSED for name in models} - makes_text
    late = {name for name in names if not is_pooling(name)}
    assert late <= {"ColPaliForRetrieval", "Terratorch"}, "ranks refuse these when they start"
    assert len(names) > 30
