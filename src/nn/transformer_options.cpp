#include <algorithm>

#include "oxytorch/error.h"
#include "oxytorch/nn/transformer.h"

namespace oxytorch::nn {

TransformerOptions TransformerOptions::gpt(std::int64_t width, std::int64_t heads, std::int64_t layers) {
  TransformerOptions made{.width = width, .heads = heads, .layers = layers};
  made.activation = Activation::GeluTanh;
  made.causal = true;
  return made;
}

TransformerOptions TransformerOptions::llama(std::int64_t width, std::int64_t heads, std::int64_t layers,
                                             std::int64_t key_heads) {
  TransformerOptions made{.width = width, .heads = heads, .layers = layers, .key_heads = key_heads};
  made.norm = NormKind::Rms;
  made.eps = 1e-5;
  made.activation = Activation::SwiGlu;
  made.bias = false;
  made.causal = true;
  made.rotary_base = 10'000;
  return made;
}

TransformerOptions TransformerOptions::bert(std::int64_t width, std::int64_t heads, std::int64_t layers) {
  TransformerOptions made{.width = width, .heads = heads, .layers = layers};
  made.eps = 1e-12;
  made.norm_first = false;
  made.dropout = made.attention_dropout = 0.1;
  return made;
}

std::int64_t TransformerOptions::hidden_width() const {
  if (hidden != 0) return hidden;
  return is_gated() ? (8 * width / 3 + 63) / 64 * 64 : 4 * width;
}

void TransformerOptions::check() const {
  const auto from = [](const char* field, std::int64_t value, std::int64_t least) {
    OXY_CHECK(value >= least, InvalidArgument, "TransformerOptions: ", field, " is ", value, "; give ", least,
              " or more.");
  };
  from("width", width, 1);
  from("heads", heads, 1);
  from("layers", layers, 1);
  from("key_heads", key_heads, 0);
  from("hidden", hidden, 0);
  OXY_CHECK(width % heads == 0, InvalidArgument, "TransformerOptions: ", heads, " heads do not share a width of ",
            width, " evenly; give a width that is a multiple of heads.");
  OXY_CHECK(heads % value_heads() == 0, InvalidArgument, "TransformerOptions: ", key_heads, " key_heads do not serve ",
            heads, " heads evenly; give a divisor of heads.");
  for (const auto& [field, value] :
       {std::pair("dropout", dropout), std::pair("attention_dropout", attention_dropout)}) {
    OXY_CHECK(value >= 0 && value < 1, InvalidArgument, "TransformerOptions: ", field, " is ", value,
              "; give a probability below 1.");
  }
  OXY_CHECK(rotary_base >= 0, InvalidArgument, "TransformerOptions: rotary_base is ", rotary_base,
            "; give a positive number, or 0 for none.");
  const std::int64_t rotated = rotary_dim.value_or(head_width());
  OXY_CHECK(rotary_base == 0 || (rotated > 0 && rotated % 2 == 0 && rotated <= head_width()), InvalidArgument,
            "TransformerOptions: ", rotated, " features of a head of ", head_width(),
            " cannot be rotated; give an even rotary_dim, or heads of an even width.");
}

std::ostream& operator<<(std::ostream& out, const TransformerOptions& options) {
  constexpr const char* kActivations[] = {"gelu", "gelu by tanh", "relu", "swiglu", "geglu"};
  out << "width=" << options.width << ", heads=" << options.heads;
  if (options.value_heads() != options.heads) out << ", key_heads=" << options.key_heads;
  out << ", hidden=" << options.hidden_width() << ", norm=" << (options.norm == NormKind::Rms ? "rms" : "layer")
      << (options.norm_first ? "" : " last") << ", activation=" << kActivations[static_cast<int>(options.activation)]
      << ", bias=" << (options.bias ? "true" : "false") << ", causal=" << (options.causal ? "true" : "false");
  if (options.window_before >= 0) out << ", window_before=" << options.window_before;
  if (options.soft_cap > 0) out << ", soft_cap=" << options.soft_cap;
  if (options.rotary_base > 0) out << ", rotary_base=" << options.rotary_base;
  if (options.dropout > 0) out << ", dropout=" << options.dropout;
  if (options.attention_dropout > 0) out << ", attention_dropout=" << options.attention_dropout;
  return out;
}

}  // namespace oxytorch::nn
