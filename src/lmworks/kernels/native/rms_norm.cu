// RMSNorm on a GPU. A block of threads takes a row: it reads it once for the sum of squares and, from the cache, once more
// for the result. 16 bytes a load where the row and the pointers allow it.
//
// In the backward pass a block takes every gridDim-th row and keeps its part of the weight's gradient in shared memory,
// where each thread adds to columns of its own; the parts are summed afterwards, always in one order.

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

namespace {

using at::Tensor;

constexpr int kThreads = 256;    // of a block. Not timed yet
constexpr int kBlocks = 4;       // of the backward pass on each multiprocessor. Not timed yet
constexpr int kLoad = 16;        // bytes
constexpr int kShared = 224 * 1024;  // bytes that a block may have on Hopper, less what it has for its sums

#define LMWORKS_CASES(...)               \
  AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__) \
  AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__) AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__)

template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T items[N];
};

__device__ float block_sum(float value) {
  __shared__ float warps[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, offset);
  }
  __syncthreads();  // the sum before this one has been read by all
  if (threadIdx.x % 32 == 0) {
    warps[threadIdx.x / 32] = value;
  }
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    sum += warps[warp];
  }
  return sum;
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* x, const float* weight, T* y, float* r, int hidden, float eps) {
  const int64_t row = blockIdx.x;
  const auto* in = reinterpret_cast<const Vector<T, N>*>(x + row * hidden);
  auto* out = reinterpret_cast<Vector<T, N>*>(y + row * hidden);
  float sum = 0;
  for (int at = threadIdx.x; at < hidden / N; at += kThreads) {
    const auto values = in[at];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float value = static_cast<float>(values.items[i]);
      sum += value * value;
    }
  }
  const float scale = 1 / sqrtf(block_sum(sum) / static_cast<float>(hidden) + eps);
  if (threadIdx.x == 0) {
    r[row] = scale;
  }
  for (int at = threadIdx.x; at < hidden / N; at += kThreads) {
    auto values = in[at];
    const auto weights = reinterpret_cast<const Vector<float, N>*>(weight)[at];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values.items[i] = static_cast<T>(static_cast<float>(values.items[i]) * scale * weights.items[i]);
    }
    out[at] = values;
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) backward_kernel(
    const T* grad, const T* x, const float* weight, const float* r, T* grad_x, float* sums, int64_t rows, int hidden) {
  extern __shared__ __align__(32) float shared[];  // (hidden)
  auto* added = reinterpret_cast<Vector<float, N>*>(shared);
  const int vectors = hidden / N;
  for (int at = threadIdx.x; at < vectors; at += kThreads) {
    added[at] = {};
  }
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const auto* g = reinterpret_cast<const Vector<T, N>*>(grad + row * hidden);
    const auto* in = reinterpret_cast<const Vector<T, N>*>(x + row * hidden);
    auto* out = reinterpret_cast<Vector<T, N>*>(grad_x + row * hidden);
    const float scale = r[row];
    float sum = 0;
    for (int at = threadIdx.x; at < vectors; at += kThreads) {
      const auto gs = g[at];
      const auto xs = in[at];
      const auto weights = reinterpret_cast<const Vector<float, N>*>(weight)[at];
      auto held = added[at];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float product = static_cast<float>(gs.items[i]) * static_cast<float>(xs.items[i]) * scale;
        held.items[i] += product;
        sum += product * weights.items[i];
      }
      added[at] = held;
    }
    const float mean = block_sum(sum) / static_cast<float>(hidden);
    for (int at = threadIdx.x; at < vectors; at += kThreads) {
      const auto gs = g[at];
      auto values = in[at];
      const auto weights = reinterpret_cast<const Vector<float, N>*>(weight)[at];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float normed = static_cast<float>(values.items[i]) * scale;
        const float weighted = static_cast<float>(gs.items[i]) * weights.items[i];
        values.items[i] = static_cast<T>((weighted - normed * mean) * scale);
      }
      out[at] = values;
    }
  }
  auto* part = reinterpret_cast<Vector<float, N>*>(sums + static_cast<int64_t>(blockIdx.x) * hidden);
  for (int at = threadIdx.x; at < vectors; at += kThreads) {
    part[at] = added[at];
  }
}

// Rows that begin where vectors of 16 bytes may (those of the fp32 weight are twice as long beside bf16).
bool aligned(std::initializer_list<const Tensor*> tensors, int64_t row_bytes) {
  return row_bytes % kLoad == 0 && std::all_of(tensors.begin(), tensors.end(), [](const Tensor* tensor) {
           return reinterpret_cast<std::uintptr_t>(tensor->const_data_ptr()) % (2 * kLoad) == 0;
         });
}

std::tuple<Tensor, Tensor> forward(const Tensor& given, const Tensor& given_weight, double eps) {
  TORCH_CHECK(
      given.dim() >= 1 && given_weight.dim() == 1 && given_weight.size(0) == given.size(-1),
      "rms_norm_native: weight must be as the last dimension of x ", given.sizes(), ", not ", given_weight.sizes());
  const c10::cuda::CUDAGuard guard(given.device());
  const Tensor x = given.contiguous(), weight = given_weight.to(at::kFloat).contiguous();
  const int64_t hidden = x.size(-1), rows = hidden ? x.numel() / hidden : 0;
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor r = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  if (rows == 0) {
    return {y, r};
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  AT_DISPATCH_SWITCH(
      x.scalar_type(), "rms_norm_native",
      LMWORKS_CASES([&] {
        constexpr int kWide = kLoad / sizeof(scalar_t);
        const auto kernel = aligned({&x, &weight, &y}, hidden * x.element_size()) ? forward_kernel<scalar_t, kWide>
                                                                                 : forward_kernel<scalar_t, 1>;
        kernel<<<rows, kThreads, 0, stream>>>(
            x.const_data_ptr<scalar_t>(), weight.const_data_ptr<float>(), y.mutable_data_ptr<scalar_t>(),
            r.mutable_data_ptr<float>(), static_cast<int>(hidden), static_cast<float>(eps));
      }));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {y, r};
}

std::tuple<Tensor, Tensor> backward(
    const Tensor& given_grad, const Tensor& given, const Tensor& given_weight, const Tensor& given_r) {
  const c10::cuda::CUDAGuard guard(given.device());
  const Tensor grad = given_grad.to(given.scalar_type()).contiguous(), x = given.contiguous();
  const Tensor weight = given_weight.to(at::kFloat).contiguous(), r = given_r.contiguous();
  const int64_t hidden = x.size(-1), rows = hidden ? x.numel() / hidden : 0;
  const int64_t shared = hidden * static_cast<int64_t>(sizeof(float));
  TORCH_CHECK(shared <= kShared, "rms_norm_native: rows of up to ", kShared / sizeof(float), " elements, not ", hidden);
  int multiprocessors = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, x.get_device()));
  const int64_t blocks = std::min<int64_t>(rows, kBlocks * multiprocessors);
  Tensor grad_x = at::empty(x.sizes(), x.options());
  Tensor sums = at::empty({blocks, hidden}, x.options().dtype(at::kFloat));
  if (rows > 0) {
    const auto stream = c10::cuda::getCurrentCUDAStream();
    AT_DISPATCH_SWITCH(
        x.scalar_type(), "rms_norm_native_backward",
        LMWORKS_CASES([&] {
          constexpr int kWide = kLoad / sizeof(scalar_t);
          const auto kernel = aligned({&grad, &x, &weight, &grad_x}, hidden * x.element_size())
              ? backward_kernel<scalar_t, kWide>
              : backward_kernel<scalar_t, 1>;
          C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
          kernel<<<blocks, kThreads, shared, stream>>>(
              grad.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(), weight.const_data_ptr<float>(),
              r.const_data_ptr<float>(), grad_x.mutable_data_ptr<scalar_t>(), sums.mutable_data_ptr<float>(), rows,
              static_cast<int>(hidden));
        }));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {grad_x, sums.sum(0).to(given_weight.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(lmworks, CUDA, library) {
  library.impl("rms_norm_native", &forward);
  library.impl("rms_norm_native_backward", &backward);
}
