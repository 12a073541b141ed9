#include "op.h"

#include <cstdarg>
#include <cstdio>
#include <exception>
#include <mutex>

namespace stepwell {
namespace {

// Positions in OrtApi.
enum : size_t {
  kCreateStatus = 0,
  kGetErrorMessage = 2,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kAttributeFloat = 85,
  kAttributeInt64 = 86,
  kAttributeString = 87,
  kContextInputCount = 88,
  kContextInput = 90,
  kContextOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorTypeAndShapeInfo = 99,
  kAttributeArrayInt64 = 163,
  kParallelFor = 274,
};

template <typename... Args>
OrtStatus* call(const OrtApi* api, size_t position, Args... args) {
  return reinterpret_cast<OrtStatus* (*)(Args...)>(api->entry[position])(args...);
}

void release(const OrtApi* api, OrtStatus* status) { reinterpret_cast<void (*)(OrtStatus*)>(api->entry[kReleaseStatus])(status); }

void check(const OrtApi* api, OrtStatus* status, const char* what) {
  if (status == nullptr) return;
  std::string message = reinterpret_cast<const char* (*)(const OrtStatus*)>(api->entry[kGetErrorMessage])(status);
  release(api, status);
  fail("%s: %s", what, message.c_str());
}

}  // namespace

void fail(const char* format, ...) {
  char buffer[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  throw OpError(buffer);
}

const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat:
      return "float32";
    case Dtype::kUint8:
      return "uint8";
    case Dtype::kInt8:
      return "int8";
    case Dtype::kInt32:
      return "int32";
    case Dtype::kInt64:
      return "int64";
    case Dtype::kFloat16:
      return "float16";
    case Dtype::kBfloat16:
      return "bfloat16";
  }
  return "another dtype";
}

OrtStatus* make_status(const OrtApi* api, const char* message) {
  constexpr int kInvalidArgument = 2;
  return call<int, const char*>(api, kCreateStatus, kInvalidArgument, message);
}

void Attributes::read(OrtStatus* status, const char* name) const {
  if (status != nullptr) check(api_, status, (std::string(op_) + ": attribute " + name).c_str());
}

int64_t Attributes::integer(const char* name) const {
  int64_t value = 0;
  read(call<const OrtKernelInfo*, const char*, int64_t*>(api_, kAttributeInt64, info_, name, &value), name);
  return value;
}

float Attributes::real(const char* name) const {
  float value = 0;
  read(call<const OrtKernelInfo*, const char*, float*>(api_, kAttributeFloat, info_, name, &value), name);
  return value;
}

std::string Attributes::text(const char* name) const {
  size_t size = 0;
  // The first call only asks for the size; its status says that a null buffer is too small.
  OrtStatus* status = call<const OrtKernelInfo*, const char*, char*, size_t*>(api_, kAttributeString, info_, name, nullptr, &size);
  if (status != nullptr && size == 0) read(status, name);
  if (status != nullptr) release(api_, status);
  std::string value(size, '\0');
  read(call<const OrtKernelInfo*, const char*, char*, size_t*>(api_, kAttributeString, info_, name, value.data(), &size), name);
  while (!value.empty() && value.back() == '\0') value.pop_back();
  return value;
}

std::vector<int64_t> Attributes::integers(const char* name) const {
  size_t size = 0;
  OrtStatus* status = call<const OrtKernelInfo*, const char*, int64_t*, size_t*>(api_, kAttributeArrayInt64, info_, name, nullptr, &size);
  if (status != nullptr && size == 0) read(status, name);
  if (status != nullptr) release(api_, status);
  // An attribute of another type reads as an empty list.
  if (size == 0) fail("%s: attribute %s: expected a list of one integer or more", op_, name);
  std::vector<int64_t> values(size);
  read(call<const OrtKernelInfo*, const char*, int64_t*, size_t*>(api_, kAttributeArrayInt64, info_, name, values.data(), &size), name);
  return values;
}

bool Context::has_input(size_t index) const {
  size_t count = 0;
  check(api_, call<const OrtKernelContext*, size_t*>(api_, kContextInputCount, context_, &count), op_);
  if (index >= count) return false;
  const OrtValue* value = nullptr;
  check(api_, call<const OrtKernelContext*, size_t, const OrtValue**>(api_, kContextInput, context_, index, &value), op_);
  return value != nullptr;
}

Tensor Context::input(size_t index, const char* name) const {
  if (!has_input(index)) fail("%s: input %s is missing", op_, name);
  const OrtValue* value = nullptr;
  check(api_, call<const OrtKernelContext*, size_t, const OrtValue**>(api_, kContextInput, context_, index, &value), name);
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api_, call<const OrtValue*, OrtTensorTypeAndShapeInfo**>(api_, kGetTensorTypeAndShape, value, &info), name);
  int dtype = 0;
  size_t rank = 0;
  Tensor tensor;
  tensor.name = name;
  call<const OrtTensorTypeAndShapeInfo*, int*>(api_, kGetTensorElementType, info, &dtype);
  call<const OrtTensorTypeAndShapeInfo*, size_t*>(api_, kGetDimensionsCount, info, &rank);
  tensor.shape.resize(rank);
  call<const OrtTensorTypeAndShapeInfo*, int64_t*, size_t>(api_, kGetDimensions, info, tensor.shape.data(), rank);
  reinterpret_cast<void (*)(OrtTensorTypeAndShapeInfo*)>(api_->entry[kReleaseTensorTypeAndShapeInfo])(info);
  tensor.dtype = static_cast<Dtype>(dtype);
  tensor.count = 1;
  for (int64_t size : tensor.shape) tensor.count *= size;
  check(api_, call<const OrtValue*, void**>(api_, kGetTensorMutableData, value, &tensor.data), name);
  return tensor;
}

Tensor Context::input(size_t index, const char* name, Dtype dtype) const {
  Tensor tensor = input(index, name);
  if (tensor.dtype != dtype) fail("%s: input %s is %s, expected %s", op_, name, dtype_name(tensor.dtype), dtype_name(dtype));
  return tensor;
}

void* Context::output_data(size_t index, std::span<const int64_t> shape) const {
  OrtValue* value = nullptr;
  check(api_,
        call<OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**>(api_, kContextOutput, context_, index, shape.data(),
                                                                            shape.size(), &value),
        op_);
  void* data = nullptr;
  check(api_, call<OrtValue*, void**>(api_, kGetTensorMutableData, value, &data), op_);
  return data;
}

void Context::parallel(size_t count, const std::function<void(size_t)>& body) const {
  if (count == 0) return;
  if (count == 1) return body(0);
  struct Work {
    const std::function<void(size_t)>& body;
    std::exception_ptr error = nullptr;
    std::once_flag failed = {};
  } work{body};
  void (*function)(void*, size_t) = [](void* user, size_t index) {
    Work& self = *static_cast<Work*>(user);
    try {
      self.body(index);
    } catch (...) {
      std::call_once(self.failed, [&self] { self.error = std::current_exception(); });
    }
  };
  check(api_,
        call<const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*>(api_, kParallelFor, context_, function, count, 0,
                                                                                      &work),
        op_);
  if (work.error != nullptr) std::rethrow_exception(work.error);
}

void check_shape(const Context& context, const Tensor& tensor, std::span<const int64_t> expected) {
  auto render = [](std::span<const int64_t> shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + (shape[i] < 0 ? std::string("any") : std::to_string(shape[i]));
    return text + "]";
  };
  bool same = tensor.shape.size() == expected.size();
  for (size_t i = 0; same && i < expected.size(); ++i) same = expected[i] < 0 || expected[i] == tensor.shape[i];
  if (!same)
    fail("%s: input %s has shape %s, expected %s", context.op(), tensor.name, render(tensor.shape).c_str(), render(expected).c_str());
}

}  // namespace stepwell
