// RMSNorm on a CPU, y = x · r · weight with r = 1/√(mean(x²) + ε), and its gradients (the formulas are in ../rms_norm.py).
//
// The schema of both operators is here; rms_norm.cu adds their CUDA kernels, rms_norm.py what tracing and autograd need.
// All sums are in fp32, the results are rounded once. `omp simd` lets the compiler keep several partial sums of a row,
// which it may not do by itself, as addition of floats is not associative.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/bit_cast.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>

namespace {

using at::Tensor;

constexpr int64_t kGrain = 32768;  // elements for which it pays to wake a thread
constexpr int64_t kParts = 64;     // sums of which the gradient of the weight is made, whatever the number of threads

#define LMWORKS_CASES(...)                  \
  AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__) \
  AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__) AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__)

void check(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK(x.dim() >= 1, "rms_norm_native: x must have a dimension to normalise");
  TORCH_CHECK(
      weight.dim() == 1 && weight.size(0) == x.size(-1),
      "rms_norm_native: weight must be (", x.size(-1), "), as the last dimension of x, not ", weight.sizes());
}

template <typename T>
T rounded(float value) {
  return static_cast<T>(value);
}

// As PyTorch rounds to bf16, to nearest and half to even, but without the branch that keeps its loops from becoming SIMD.
template <>
at::BFloat16 rounded(float value) {
  const auto bits = c10::bit_cast<uint32_t>(value);
  const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return at::BFloat16(static_cast<uint16_t>(value == value ? nearest : 0x7fc0), at::BFloat16::from_bits());
}

template <typename T>
void forward_row(const T* x, const float* weight, T* y, float* r, int64_t hidden, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < hidden; ++i) {
    const float value = static_cast<float>(x[i]);
    sum += value * value;
  }
  const float scale = 1 / std::sqrt(sum / static_cast<float>(hidden) + eps);
  *r = scale;
#pragma omp simd
  for (int64_t i = 0; i < hidden; ++i) {
    y[i] = rounded<T>(static_cast<float>(x[i]) * scale * weight[i]);
  }
}

template <typename T>
void backward_row(
    const T* grad, const T* x, const float* weight, float r, T* grad_x, float* grad_weight, int64_t hidden) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < hidden; ++i) {
    const float product = static_cast<float>(grad[i]) * static_cast<float>(x[i]) * r;
    grad_weight[i] += product;
    sum += product * weight[i];
  }
  const float mean = sum / static_cast<float>(hidden);
#pragma omp simd
  for (int64_t i = 0; i < hidden; ++i) {
    const float normed = static_cast<float>(x[i]) * r;
    grad_x[i] = rounded<T>((static_cast<float>(grad[i]) * weight[i] - normed * mean) * r);
  }
}

std::tuple<Tensor, Tensor> forward(const Tensor& given, const Tensor& given_weight, double eps) {
  check(given, given_weight);
  const Tensor x = given.contiguous(), weight = given_weight.to(at::kFloat).contiguous();
  const int64_t hidden = x.size(-1), rows = hidden ? x.numel() / hidden : 0;
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor r = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  AT_DISPATCH_SWITCH(x.scalar_type(), "rms_norm_native", LMWORKS_CASES([&] {
    const auto* in = x.const_data_ptr<scalar_t>();
    auto* out = y.mutable_data_ptr<scalar_t>();
    const auto* w = weight.const_data_ptr<float>();
    auto* scales = r.mutable_data_ptr<float>();
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, hidden));
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        forward_row(in + row * hidden, w, out + row * hidden, scales + row, hidden, static_cast<float>(eps));
      }
    });
  }));
  return {y, r};
}

std::tuple<Tensor, Tensor> backward(
    const Tensor& given_grad, const Tensor& given, const Tensor& given_weight, const Tensor& given_r) {
  check(given, given_weight);
  const Tensor grad = given_grad.to(given.scalar_type()).contiguous(), x = given.contiguous();
  const Tensor weight = given_weight.to(at::kFloat).contiguous(), r = given_r.contiguous();
  const int64_t hidden = x.size(-1), rows = hidden ? x.numel() / hidden : 0, parts = std::min(kParts, rows);
  Tensor grad_x = at::empty(x.sizes(), x.options());
  Tensor sums = at::zeros({parts, hidden}, x.options().dtype(at::kFloat));
  AT_DISPATCH_SWITCH(x.scalar_type(), "rms_norm_native_backward", LMWORKS_CASES([&] {
    const auto* g = grad.const_data_ptr<scalar_t>();
    const auto* in = x.const_data_ptr<scalar_t>();
    const auto* w = weight.const_data_ptr<float>();
    const auto* scales = r.const_data_ptr<float>();
    auto* out = grad_x.mutable_data_ptr<scalar_t>();
    auto* added = sums.mutable_data_ptr<float>();
    const int64_t grain = std::max<int64_t>(1, kGrain * parts / std::max<int64_t>(1, rows * hidden));
    at::parallel_for(0, parts, grain, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        for (int64_t row = part * rows / parts; row < (part + 1) * rows / parts; ++row) {
          const int64_t at = row * hidden;
          backward_row(g + at, in + at, w, scales[row], out + at, added + part * hidden, hidden);
        }
      }
    });
  }));
  return {grad_x, sums.sum(0).to(given_weight.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lmworks, library) {
  library.def(
      "rms_norm_native(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor r)", {at::Tag::pt2_compliant_tag});
  library.def(
      "rms_norm_native_backward(Tensor grad, Tensor x, Tensor weight, Tensor r) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(lmworks, CPU, library) {
  library.impl("rms_norm_native", &forward);
  library.impl("rms_norm_native_backward", &backward);
}
