// The entry point that ONNX Runtime calls, and what the library says of itself.
#include "library.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "isa.h"
#include "op.h"

namespace stepwell {
namespace {

constexpr uint32_t kApiVersion = 18;
constexpr int kOldestMinor = 18;

enum : size_t { kCreateCustomOpDomain = 26, kCustomOpDomainAdd = 27, kAddCustomOpDomain = 28 };

}  // namespace

void Registry::add(const OrtCustomOp* op) {
  using Add = OrtStatus* (*)(OrtCustomOpDomain*, const OrtCustomOp*);
  if (reinterpret_cast<Add>(api_->entry[kCustomOpDomainAdd])(domain_, op) != nullptr) fail("cannot register an op");
}

}  // namespace stepwell

extern "C" {

__attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace stepwell;
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) return nullptr;  // no table to make a status from; the session then finds no `stepwell` ops and says so
  int major = 0;
  char* rest = nullptr;
  const char* version = base->GetVersionString();
  major = static_cast<int>(std::strtol(version, &rest, 10));
  const long minor = *rest == '.' ? std::strtol(rest + 1, nullptr, 10) : 0;
  if (major != 1 || minor < kOldestMinor)
    return make_status(api, (std::string("stepwell ops need onnxruntime 1.18 or newer of the 1.x line, found ") + version).c_str());
  OrtCustomOpDomain* domain = nullptr;
  using Create = OrtStatus* (*)(const char*, OrtCustomOpDomain**);
  if (OrtStatus* status = reinterpret_cast<Create>(api->entry[kCreateCustomOpDomain])("stepwell", &domain)) return status;
  try {
    Registry registry(api, domain);
    register_quant_linear(registry);
    register_rms_norm(registry);
    register_embed_dequant(registry);
    register_paged_attention(registry);
  } catch (const std::exception& error) {
    return make_status(api, error.what());
  }
  // The session keeps the domain's address for its own life; domains are few and small, so they are not released.
  using Attach = OrtStatus* (*)(OrtSessionOptions*, OrtCustomOpDomain*);
  return reinterpret_cast<Attach>(api->entry[kAddCustomOpDomain])(options, domain);
}

// The ISA that a kernel created now would use, or null where STEPWELL_ISA names one that this machine lacks.
__attribute__((visibility("default"))) const char* stepwell_isa() {
  try {
    return stepwell::isa_name(stepwell::choose_isa());
  } catch (const std::exception&) {
    return nullptr;
  }
}

// 1 when STEPWELL_ISA may name this one here.
__attribute__((visibility("default"))) int stepwell_isa_available(const char* name) {
  using stepwell::Isa;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512Vnni, Isa::kAmx, Isa::kAmxEmulated})
    if (std::strcmp(name, stepwell::isa_name(isa)) == 0) return stepwell::isa_available(isa);
  return 0;
}

}  // extern "C"
