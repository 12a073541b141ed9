// What every op of the library needs from ONNX Runtime: checked tensor views, attributes, parallel loops, errors.
//
// An op is a class with a constructor from `Attributes` and `void compute(Context&) const`. Both may throw
// `OpError`; nothing else crosses into ONNX Runtime, where it becomes an INVALID_ARGUMENT status.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_abi.h"

namespace stepwell {

struct OpError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// printf-style; the message names the op, the input, what came and what was expected.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

enum class Dtype : int { kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kFloat16 = 10, kBfloat16 = 16 };
const char* dtype_name(Dtype dtype);

// A borrowed tensor: valid while the kernel call lasts.
struct Tensor {
  const char* name = "";
  void* data = nullptr;
  Dtype dtype = Dtype::kFloat;
  std::vector<int64_t> shape;
  int64_t count = 0;

  bool present() const { return data != nullptr || count == 0; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

class Attributes {
 public:
  Attributes(const OrtApi* api, const OrtKernelInfo* info, const char* op) : api_(api), info_(info), op_(op) {}
  int64_t integer(const char* name) const;
  float real(const char* name) const;
  std::string text(const char* name) const;
  std::vector<int64_t> integers(const char* name) const;

 private:
  // Fails, naming the op and the attribute, unless the status is good.
  void read(OrtStatus* status, const char* name) const;

  const OrtApi* api_;
  const OrtKernelInfo* info_;
  const char* op_;
};

class Context {
 public:
  Context(const OrtApi* api, OrtKernelContext* context, const char* op) : api_(api), context_(context), op_(op) {}
  const char* op() const { return op_; }
  bool has_input(size_t index) const;
  // Fails unless the input is present and of this dtype.
  Tensor input(size_t index, const char* name, Dtype dtype) const;
  // Fails unless the input is present; any dtype of `Dtype`.
  Tensor input(size_t index, const char* name) const;
  template <typename T>
  T* output(size_t index, std::span<const int64_t> shape) const {
    return static_cast<T*>(output_data(index, shape));
  }
  // Calls body(i) for i in [0, count) on ONNX Runtime's own threads; throws the first exception that a body threw.
  void parallel(size_t count, const std::function<void(size_t)>& body) const;

 private:
  void* output_data(size_t index, std::span<const int64_t> shape) const;

  const OrtApi* api_;
  OrtKernelContext* context_;
  const char* op_;
};

// Fails unless the shape has `expected` dimensions (-1 matches any size).
void check_shape(const Context& context, const Tensor& tensor, std::span<const int64_t> expected);

// How an op presents itself: dtypes per input (0 = any), which inputs are optional, number of outputs.
struct Signature {
  const char* name;
  std::vector<int> inputs;
  size_t required_inputs;
  std::vector<int> outputs;
  size_t required_outputs;
};

OrtStatus* make_status(const OrtApi* api, const char* message);

template <typename Kernel>
struct Op : OrtCustomOp {
  explicit Op(const Signature* signature) : OrtCustomOp{}, signature_(signature) {
    version = 18;
    GetName = [](const OrtCustomOp* op) { return self(op)->name; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    GetInputType = [](const OrtCustomOp* op, size_t i) { return self(op)->inputs[i]; };
    GetInputTypeCount = [](const OrtCustomOp* op) { return self(op)->inputs.size(); };
    GetOutputType = [](const OrtCustomOp* op, size_t i) { return self(op)->outputs[i]; };
    GetOutputTypeCount = [](const OrtCustomOp* op) { return self(op)->outputs.size(); };
    GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) { return i < self(op)->required_inputs ? 0 : 1; };
    GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) { return i < self(op)->required_outputs ? 0 : 1; };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
    GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
    GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
    GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
    GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return 1; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out) -> OrtStatus* {
      return guarded(api, [&] { *out = new Instance{api, self(op)->name, Kernel(Attributes(api, info, self(op)->name))}; });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) -> OrtStatus* {
      auto* instance = static_cast<Instance*>(kernel);
      return guarded(instance->api, [&] {
        Context view(instance->api, context, instance->name);
        instance->kernel.compute(view);
      });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Instance*>(kernel); };
  }

 private:
  struct Instance {
    const OrtApi* api;
    const char* name;
    Kernel kernel;
  };
  static const Signature* self(const OrtCustomOp* op) { return static_cast<const Op*>(op)->signature_; }
  template <typename F>
  static OrtStatus* guarded(const OrtApi* api, F&& body) {
    try {
      body();
      return nullptr;
    } catch (const std::exception& error) {
      return make_status(api, error.what());
    }
  }
  const Signature* signature_;
};

}  // namespace stepwell
