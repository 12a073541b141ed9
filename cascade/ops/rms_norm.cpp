// RMSNorm and RMSNormQuant; FORMAT.md states the order of the sum.
#include <algorithm>
#include <array>
#include <cmath>

#include "library.h"
#include "op.h"
#include "quant_linear.h"
#include "scratch.h"

namespace stepwell {
namespace {

// What RMSNorm and RMSNormQuant share: the input, its checks and the split of rows.
struct NormInput {
  const float* x;
  const float* gamma;
  int64_t rows, k;

  NormInput(const Context& context) {
    const Tensor tensor = context.input(0, "x", Dtype::kFloat);
    check_shape(context, tensor, std::array<int64_t, 2>{-1, -1});
    x = tensor.as<float>();
    rows = tensor.shape[0];
    k = tensor.shape[1];
    if (k < kPanelRows || k % kPanelRows != 0)
      fail("%s: input x has %lld columns, expected a multiple of 16", context.op(), static_cast<long long>(k));
    const Tensor scale = context.input(1, "gamma", Dtype::kFloat);
    check_shape(context, scale, std::array<int64_t, 1>{k});
    gamma = scale.as<float>();
  }

  template <typename F>
  void each_row(const Context& context, F&& body) const {
    constexpr int64_t kRowsAtOnce = 16;
    context.parallel(static_cast<size_t>((rows + kRowsAtOnce - 1) / kRowsAtOnce), [&](size_t run) {
      const int64_t from = static_cast<int64_t>(run) * kRowsAtOnce, to = std::min(rows, from + kRowsAtOnce);
      for (int64_t row = from; row < to; ++row) body(row);
    });
  }
};

float checked_epsilon(const char* op, float epsilon) {
  if (!std::isfinite(epsilon) || epsilon < 0) fail("%s: attribute epsilon is %g, expected a finite number, 0 or more", op, double{epsilon});
  return epsilon;
}

class RmsNorm {
 public:
  static constexpr const char* kName = "RMSNorm";

  explicit RmsNorm(const Attributes& attributes)
      : kernels_(&linear_kernels(choose_isa())), epsilon_(checked_epsilon(kName, attributes.real("epsilon"))) {}

  void compute(const Context& context) const {
    const NormInput in(context);
    float* out = context.output<float>(0, std::array<int64_t, 2>{in.rows, in.k});
    in.each_row(context, [&](int64_t row) { kernels_->rms_norm(in.x + row * in.k, in.gamma, in.k, epsilon_, out + row * in.k); });
  }

 private:
  const LinearKernels* kernels_;
  float epsilon_;
};

class RmsNormQuant {
 public:
  static constexpr const char* kName = "RMSNormQuant";

  explicit RmsNormQuant(const Attributes& attributes)
      : kernels_(&linear_kernels(choose_isa())),
        epsilon_(checked_epsilon(kName, attributes.real("epsilon"))),
        group_(attributes.integer("act_group")) {}

  void compute(const Context& context) const {
    const NormInput in(context);
    const int64_t group = checked_group(kName, group_, in.k), groups = in.k / group;
    int8_t* codes = context.output<int8_t>(0, std::array<int64_t, 2>{in.rows, in.k});
    float* scales = context.output<float>(1, std::array<int64_t, 2>{in.rows, groups});
    Scratch<float> normed(in.rows * in.k);
    in.each_row(context, [&](int64_t row) {
      float* to = normed.data + row * in.k;
      kernels_->rms_norm(in.x + row * in.k, in.gamma, in.k, epsilon_, to);
      kernels_->quantize(to, in.k, group, 1, codes + row * in.k, scales + row * groups);
    });
  }

 private:
  const LinearKernels* kernels_;
  float epsilon_;
  int64_t group_;
};

const Signature kRmsNorm{RmsNorm::kName, {1, 1}, 2, {1}, 1};
const Signature kRmsNormQuant{RmsNormQuant::kName, {1, 1}, 2, {3, 1}, 2};

}  // namespace

void register_rms_norm(Registry& registry) {
  static Op<RmsNorm> norm(&kRmsNorm);
  static Op<RmsNormQuant> norm_quant(&kRmsNormQuant);
  registry.add(&norm);
  registry.add(&norm_quant);
}

}  // namespace stepwell
