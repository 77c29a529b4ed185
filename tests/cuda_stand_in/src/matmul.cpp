// cuBLAS and cuBLASLt: the entry points that torch and AOTInductor's libraries call. A multiplication
// is work on the stream that calls the BLAS of torch's CPU build on the same addresses. It also
// overwrites its workspace, as a kernel may: one that was freed too early gives wrong numbers.

#include "state.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <dlfcn.h>

#include <cmath>
#include <cstring>

using namespace stand_in;

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
  void* workspace = nullptr;
  size_t workspace_size = 0;
};

struct Operand {
  char* data;
  cudaDataType type;
  long long ld, stride;
  bool transposed = false;

  size_t item() const { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }
  char* batch(int index) const { return data + index * stride * static_cast<long long>(item()); }
};

// d (m x n) = alpha * a (m x k) * b (k x n) + beta * c, by columns.
struct Product {
  long long m, n, k;
  int batches = 1;
  Operand a, b, c, d;
  double alpha, beta;
  void* workspace = nullptr;
  size_t workspace_size = 0;
  int epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  cudaDataType bias_type = CUDA_R_32F;
};

double load(const void* data, cudaDataType type, size_t i) {
  switch (type) {
    case CUDA_R_64F: return static_cast<const double*>(data)[i];
    case CUDA_R_32F: return static_cast<const float*>(data)[i];
    case CUDA_R_16F: return static_cast<double>(static_cast<const _Float16*>(data)[i]);
    default: {
      uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16;
      float value;
      memcpy(&value, &bits, sizeof value);
      return value;
    }
  }
}

void store(void* data, cudaDataType type, size_t i, double value) {
  switch (type) {
    case CUDA_R_64F: static_cast<double*>(data)[i] = value; break;
    case CUDA_R_32F: static_cast<float*>(data)[i] = static_cast<float>(value); break;
    case CUDA_R_16F: static_cast<_Float16*>(data)[i] = static_cast<_Float16>(value); break;
    default: {
      float narrow = static_cast<float>(value);
      uint32_t bits;
      memcpy(&bits, &narrow, sizeof bits);
      bits += 0x7FFF + ((bits >> 16) & 1);  // to the nearest, ties to even
      static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
}

// The rows x columns of an operand, one after the other in T.
template <typename T>
std::vector<T> gathered(const Operand& x, const char* data, long long rows, long long columns) {
  std::vector<T> out(rows * columns);
  for (long long j = 0; j < columns; j++)
    for (long long i = 0; i < rows; i++)
      out[i + j * rows] = static_cast<T>(load(data, x.type, x.transposed ? j + i * x.ld : i + j * x.ld));
  return out;
}

template <typename T>
using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*, const T*, const int*,
                      const T*, const int*, const T*, T*, const int*);

template <typename T>
void multiply(const Product& p, const char* name) {
  static auto gemm = reinterpret_cast<Gemm<T>>(dlsym(dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD), name));
  const int m = static_cast<int>(p.m), n = static_cast<int>(p.n), k = static_cast<int>(p.k);
  const T one = 1, zero = 0;
  for (int batch = 0; batch < p.batches; batch++) {
    std::vector<T> a = gathered<T>(p.a, p.a.batch(batch), m, k), b = gathered<T>(p.b, p.b.batch(batch), k, n);
    std::vector<T> product(p.m * p.n);
    if (k) gemm("N", "N", &m, &n, &k, &one, a.data(), &m, b.data(), &k, &zero, product.data(), &m);
    for (long long j = 0; j < n; j++)
      for (long long i = 0; i < m; i++) {
        double value = p.alpha * product[i + j * m];
        if (p.beta) value += p.beta * load(p.c.batch(batch), p.c.type, i + j * p.c.ld);
        if (p.bias) value += load(p.bias, p.bias_type, i);
        if (p.epilogue & CUBLASLT_EPILOGUE_RELU) value = std::max(value, 0.0);
        if (p.epilogue & CUBLASLT_EPILOGUE_GELU)
          value *= 0.5 * (1 + std::tanh(0.7978845608 * (value + 0.044715 * value * value * value)));
        store(p.d.batch(batch), p.d.type, i + j * p.d.ld, value);
      }
  }
}

void run(const Product& p) {
  if (p.workspace) {
    Lock lock(state().mutex);
    if (kind_of(p.workspace) == Block::kUnknown) {
      state().broken = cudaErrorIllegalAddress;
      return;
    }
    memset(p.workspace, 0xEE, std::min<size_t>(p.workspace_size, 4096));
  }
  p.d.type == CUDA_R_64F ? multiply<double>(p, "dgemm_") : multiply<float>(p, "sgemm_");
}

cublasStatus_t submitted(const char* call, cudaStream_t stream, Product p) {
  Lock lock(state().mutex);
  if (entered(call) != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
  std::function<void()> body;
  if (state().computing) body = [p] { run(p); };
  NodeFacts facts;
  for (const void* each : {static_cast<const void*>(p.a.data), static_cast<const void*>(p.b.data), p.bias,
                           static_cast<const void*>(p.c.data), static_cast<const void*>(p.d.data),
                           static_cast<const void*>(p.workspace)})
    facts.parameters.emplace_back(reinterpret_cast<const char*>(&each), reinterpret_cast<const char*>(&each + 1));
  cudaError_t status = submit(stream_of(stream), call, std::move(body), std::move(facts));
  return status == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

double scalar(const void* value, bool wide) {
  return wide ? *static_cast<const double*>(value) : *static_cast<const float*>(value);
}

Handle* of(cublasHandle_t handle) { return reinterpret_cast<Handle*>(handle); }

Operand operand(const void* data, cudaDataType type, long long ld, long long stride, cublasOperation_t operation) {
  return {static_cast<char*>(const_cast<void*>(data)), type, ld, stride, operation != CUBLAS_OP_N};
}

}  // namespace

// ---- cuBLAS: handles

EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = reinterpret_cast<cublasHandle_t>(new Handle);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete of(handle);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  of(handle)->stream = stream;
  of(handle)->workspace = nullptr;  // cublasSetStream resets the workspace to cuBLAS's own
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void* workspace, size_t size) {
  of(handle)->workspace = workspace;
  of(handle)->workspace_size = size;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  of(handle)->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = of(handle)->math;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  of(handle)->pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = of(handle)->pointers;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) { return CUBLAS_STATUS_SUCCESS; }

// ---- cuBLAS: multiplications

EXPORT cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb,
                                                 int m, int n, int k, const void* alpha, const void* a,
                                                 cudaDataType a_type, int lda, long long a_stride, const void* b,
                                                 cudaDataType b_type, int ldb, long long b_stride, const void* beta,
                                                 void* c, cudaDataType c_type, int ldc, long long c_stride, int batches,
                                                 cublasComputeType_t compute, cublasGemmAlgo_t) {
  bool wide = compute == CUBLAS_COMPUTE_64F;
  Operand out = operand(c, c_type, ldc, c_stride, CUBLAS_OP_N);
  Product p{m, n, k, batches, operand(a, a_type, lda, a_stride, ta), operand(b, b_type, ldb, b_stride, tb), out, out,
            scalar(alpha, wide), scalar(beta, wide)};
  p.workspace = of(handle)->workspace;
  p.workspace_size = of(handle)->workspace_size;
  return submitted("cublasGemm", of(handle)->stream, p);
}

EXPORT cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                                   int k, const void* alpha, const void* a, cudaDataType a_type, int lda,
                                   const void* b, cudaDataType b_type, int ldb, const void* beta, void* c,
                                   cudaDataType c_type, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algo) {
  return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c,
                                    c_type, ldc, 0, 1, compute, algo);
}

#define GEMM(letter, type, cuda, compute)                                                                              \
  EXPORT cublasStatus_t cublas##letter##gemm_v2(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb,     \
                                                int m, int n, int k, const type* alpha, const type* a, int lda,        \
                                                const type* b, int ldb, const type* beta, type* c, int ldc) {          \
    return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, a, cuda, lda, 0, b, cuda, ldb, 0, beta, c, cuda, \
                                      ldc, 0, 1, compute, CUBLAS_GEMM_DEFAULT);                                        \
  }                                                                                                                    \
  EXPORT cublasStatus_t cublas##letter##gemmStridedBatched(                                                            \
      cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const type* alpha,       \
      const type* a, int lda, long long a_stride, const type* b, int ldb, long long b_stride, const type* beta,        \
      type* c, int ldc, long long c_stride, int batches) {                                                             \
    return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, a, cuda, lda, a_stride, b, cuda, ldb, b_stride,  \
                                      beta, c, cuda, ldc, c_stride, batches, compute, CUBLAS_GEMM_DEFAULT);            \
  }

GEMM(S, float, CUDA_R_32F, CUBLAS_COMPUTE_32F)
GEMM(D, double, CUDA_R_64F, CUBLAS_COMPUTE_64F)

// ---- cuBLASLt. Descriptions are opaque to callers, and kept in their own memory here.

namespace {

struct Description {
  cublasComputeType_t compute;
  cudaDataType scale;
  std::map<int, std::vector<char>> attributes;

  template <typename T>
  T get(int attribute, T otherwise) const {
    auto found = attributes.find(attribute);
    if (found == attributes.end()) return otherwise;
    T value{};
    memcpy(&value, found->second.data(), std::min(sizeof value, found->second.size()));
    return value;
  }
};

struct Layout {
  cudaDataType type;
  uint64_t rows, columns;
  int64_t ld;
  std::map<int, int64_t> attributes;

  int64_t get(int attribute, int64_t otherwise) const {
    auto found = attributes.find(attribute);
    return found == attributes.end() ? otherwise : found->second;
  }
};

Operand operand(const void* data, const Layout* layout, int operation) {
  return operand(data, layout->type, layout->ld, layout->get(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, 0),
                 static_cast<cublasOperation_t>(operation));
}

}  // namespace

EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(new Description{compute, scale, {}});
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t which,
                                                     const void* value, size_t size) {
  auto* bytes = static_cast<const char*>(value);
  reinterpret_cast<Description*>(handle)->attributes[which].assign(bytes, bytes + size);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t handle) {
  delete reinterpret_cast<Description*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t rows,
                                                 uint64_t columns, int64_t ld) {
  *made = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, ld, {}});
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                       cublasLtMatrixLayoutAttribute_t which, const void* value,
                                                       size_t size) {
  int64_t wide = 0;
  memcpy(&wide, value, std::min(size, sizeof wide));
  reinterpret_cast<Layout*>(handle)->attributes[which] = wide;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t handle) {
  delete reinterpret_cast<Layout*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = reinterpret_cast<cublasLtMatmulPreference_t>(new char);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                           cublasLtMatmulPreferenceAttributes_t, const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle) {
  delete reinterpret_cast<char*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                                     cublasLtMatmulHeuristicResult_t results[], int* count) {
  memset(results, 0, sizeof *results);
  results->state = CUBLAS_STATUS_SUCCESS;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                                     cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                                     const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                                     cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t*, void* workspace,
                                     size_t workspace_size, cudaStream_t stream) {
  auto* description = reinterpret_cast<Description*>(desc);
  auto* la = reinterpret_cast<Layout*>(a_layout);
  auto* ld = reinterpret_cast<Layout*>(d_layout);
  int ta = description->get<int>(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N);
  int tb = description->get<int>(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  bool wide = description->scale == CUDA_R_64F;
  Product p{static_cast<long long>(ld->rows),
            static_cast<long long>(ld->columns),
            static_cast<long long>(ta == CUBLAS_OP_N ? la->columns : la->rows),
            static_cast<int>(ld->get(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 1)),
            operand(a, la, ta),
            operand(b, reinterpret_cast<Layout*>(b_layout), tb),
            operand(c, reinterpret_cast<Layout*>(c_layout), CUBLAS_OP_N),
            operand(d, ld, CUBLAS_OP_N),
            scalar(alpha, wide),
            scalar(beta, wide)};
  p.epilogue = description->get<int>(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT);
  p.bias = description->get<const void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr);
  p.bias_type = static_cast<cudaDataType>(description->get<int>(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, ld->type));
  p.workspace = workspace;
  p.workspace_size = workspace_size;
  return submitted("cublasLtMatmul", stream, p);
}
