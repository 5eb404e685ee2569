# pycoll/_cuda.so: the kernels and what calls the CUDA runtime. Not in a default build (decision
# 0019); linked against the runtime alone, statically, and loaded when a device is first used.
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know that nvcc has it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/kernels/cuda/*.cu
     ${CMAKE_SOURCE_DIR}/csrc/kernels/cuda/*.cc)
pycoll_kernel_files(cuda cuda_kernels.cu kernel_files)
list(APPEND cuda_sources ${kernel_files})
add_library(cuda_kernels OBJECT EXCLUDE_FROM_ALL ${cuda_sources})
target_include_directories(cuda_kernels PRIVATE ${CMAKE_SOURCE_DIR}/csrc)
target_link_libraries(cuda_kernels PRIVATE CUDA::cudart_static)
add_library(pycoll_cuda MODULE EXCLUDE_FROM_ALL $<TARGET_OBJECTS:cuda_kernels>)
target_link_libraries(pycoll_cuda PRIVATE CUDA::cudart_static Threads::Threads)
set_target_properties(
  pycoll_cuda
  PROPERTIES PREFIX ""
             LINKER_LANGUAGE CXX
             OUTPUT_NAME _cuda
             LIBRARY_OUTPUT_DIRECTORY ${PYCOLL_OUTPUT_DIR})

# Programs with this library in them. In a build without it they have the emulated device.
set_source_files_properties(${CMAKE_SOURCE_DIR}/benchmarks/gpu_latency.cc PROPERTIES LANGUAGE CUDA)
get_target_property(layers join PYCOLL_REACHABLE)
foreach(program tests/cpp/gpu_matrix benchmarks/gpu_latency)
  cmake_path(GET program FILENAME name)
  cmake_path(GET program PARENT_PATH folder)
  add_executable(${name} EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/${program}.cc
                                          $<TARGET_OBJECTS:cuda_kernels>)
  foreach(layer ${layers})
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:${layer}>)
  endforeach()
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/csrc ${CMAKE_SOURCE_DIR}/tests/cpp
                                             ${CMAKE_SOURCE_DIR}/benchmarks)
  target_link_libraries(${name} PRIVATE CUDA::cudart_static Threads::Threads)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX
                                           RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/${folder})
endforeach()

foreach(target cuda_kernels gpu_matrix gpu_latency)
  # -fmad=false, as -ffp-contract=off: the same bits as the host's.
  target_compile_options(
    ${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-fmad=false>"
                      "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>")
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)  # the driver unpacks them once
    target_compile_options(${target}
                           PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>")
  endif()
  set_target_properties(
    ${target}
    PROPERTIES UNITY_BUILD OFF  # they are long, and few
               CUDA_STANDARD 20
               CUDA_STANDARD_REQUIRED ON
               CUDA_RUNTIME_LIBRARY Static
               CUDA_ARCHITECTURES "${PYCOLL_CUDA_ARCHITECTURES}")
endforeach()
