// What a family of ops implements to be part of the library.
#pragma once

#include "ort_abi.h"

namespace stepwell {

class Registry {
 public:
  Registry(const OrtApi* api, OrtCustomOpDomain* domain) : api_(api), domain_(domain) {}
  void add(const OrtCustomOp* op);

 private:
  const OrtApi* api_;
  OrtCustomOpDomain* domain_;
};

void register_quant_linear(Registry& registry);
void register_rms_norm(Registry& registry);
void register_embed_dequant(Registry& registry);
void register_paged_attention(Registry& registry);

}  // namespace stepwell
