/* A CUDA driver without a device. It offers what Triton's own launch code calls, loads any binary, believes any pointer,
 * and reports each launch to an observer instead of executing it. pretended_cuda.py builds it as libcuda.so.1. */

#include "cuda.h"
#include <stdint.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

typedef void (*Observer)(uint64_t function, unsigned x, unsigned y, unsigned z, unsigned options, void **params);

static Observer observer;
static uintptr_t last_handle = 1 << 20;

/* Sets the function that is called with each launch, before the launch returns. NULL: launches do nothing at all. */
EXPORT void pretended_observe(Observer new_observer) { observer = new_observer; }

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  if (observer)
    observer((uint64_t)(uintptr_t)function, config->gridDimX, config->gridDimY, config->gridDimZ, config->numAttrs,
             params);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)++last_handle;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)++last_handle;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 227 << 10 : 32;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }

EXPORT CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) { return cuCtxGetDevice(device); }

EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

EXPORT CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the pretended driver";
  return CUDA_SUCCESS;
}

/* Linked, but never needed here: Triton has no other use for them than clusters and tensor descriptors. */
EXPORT CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                       const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                       CUtensorMapFloatOOBfill fill) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
