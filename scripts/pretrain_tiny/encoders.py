"""The text encoders of the tiny pipelines, in transformers' own classes."""

CLIP_WIDTH, T5_WIDTH, GEMMA_WIDTH = 32, 64, 64
GEMMA_WINDOW = 16  # tokens that a token sees; two layers see 30 back


def clip_config(tokenizer):
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def projecting_clip_encoder(tokenizer):
    """CLIP as SD3 has it: its one vector goes through a projection."""
    from transformers import CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(clip_config(tokenizer))


def clip_encoder(tokenizer):
    """CLIP as FLUX has it."""
    from transformers import CLIPTextModel

    return CLIPTextModel(clip_config(tokenizer))


def t5_encoder(tokenizer):
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=T5_WIDTH,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )
    )


def gemma_encoder(tokenizer):
    """Gemma 2 as SANA has it, each token seeing `GEMMA_WINDOW` of those before it.

    So what comes long before a prompt, SANA's instruction, reaches it with its last words only,
    and pretraining need not read the rest.
    """
    from transformers import Gemma2Config, Gemma2Model

    return Gemma2Model(
        Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=GEMMA_WIDTH,
            intermediate_size=2 * GEMMA_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention"] * 2,
            sliding_window=GEMMA_WINDOW,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            max_position_embeddings=1024,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
