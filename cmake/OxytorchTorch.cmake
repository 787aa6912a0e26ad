# oxytorch_find_torch([FOLDER...]) makes the target Oxytorch::torch: LibTorch's headers and libraries. Oxytorch's own build
# and the installed package both call it. It sets, in the caller's scope,
#   Oxytorch_TORCH_FOUND          whether there is one
#   Oxytorch_TORCH_FOUND_VERSION  its version
#   Oxytorch_TORCH_LIBRARY_DIR    the folder of libtorch.so
#   Oxytorch_TORCH_PROBLEM        where there is none: why, in one sentence
#
# torch's own CMake package is not run. That of a CUDA build (the default wheel) refuses a machine without the CUDA toolkit,
# although everything that a program needs is in torch's folder. As torch.utils.cpp_extension does, this takes the headers,
# libc10, libtorch_cpu and libtorch from there. Torch_DIR has the meaning it has for find_package(Torch), so both find the
# same torch; where the project has found Torch already, its target `torch` is linked.

# Finds the folder of TorchConfig.cmake, which a wheel, a LibTorch archive and a system's package all have. What the user
# names comes first, then `folders`, then the torch that Python would import, then the system's prefixes.
function(_oxytorch_find_torch_dir)
  if(EXISTS "${Torch_DIR}/TorchConfig.cmake")
    return()
  endif()
  set(named "${Torch_DIR}" "${Torch_ROOT}" "$ENV{Torch_DIR}" "$ENV{Torch_ROOT}")
  list(REMOVE_ITEM named "" "Torch_DIR-NOTFOUND")
  unset(Torch_DIR)
  unset(Torch_DIR CACHE)
  set(names NAMES TorchConfig.cmake PATH_SUFFIXES share/cmake/Torch Torch lib/cmake/Torch)
  find_path(Torch_DIR ${names} HINTS ${named} DOC "The folder of TorchConfig.cmake"
    NO_CMAKE_SYSTEM_PATH NO_SYSTEM_ENVIRONMENT_PATH)
  if(NOT Torch_DIR AND ARGN)
    find_path(Torch_DIR ${names} PATHS ${ARGN} NO_DEFAULT_PATH)
  endif()
  if(NOT Torch_DIR)
    set(python "${Python3_EXECUTABLE}")
    if(NOT python)
      find_program(Oxytorch_PYTHON NAMES python3 python)
      set(python "${Oxytorch_PYTHON}")
    endif()
    if(python)
      # Finding is enough: importing takes seconds, and fails where torch's own libraries are incomplete.
      execute_process(
        COMMAND ${python} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
        OUTPUT_VARIABLE package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
      if(NOT failed)
        find_path(Torch_DIR ${names} PATHS "${package}" NO_DEFAULT_PATH)
      endif()
    endif()
  endif()
  find_path(Torch_DIR ${names})
  set(Torch_DIR "${Torch_DIR}" PARENT_SCOPE)
endfunction()

function(oxytorch_find_torch)
  set(Oxytorch_TORCH_FOUND FALSE PARENT_SCOPE)
  _oxytorch_find_torch_dir(${ARGN})
  if(NOT Torch_DIR)
    set(Oxytorch_TORCH_PROBLEM "torch was not found: install it for the Python in use, or name the folder of a \
LibTorch in CMAKE_PREFIX_PATH or Torch_DIR." PARENT_SCOPE)
    return()
  endif()
  set(PACKAGE_VERSION "")
  include("${Torch_DIR}/TorchConfigVersion.cmake" OPTIONAL)
  set(Oxytorch_TORCH_FOUND_VERSION "${PACKAGE_VERSION}" PARENT_SCOPE)
  get_filename_component(root "${Torch_DIR}/../../.." ABSOLUTE)
  set(Oxytorch_TORCH_LIBRARY_DIR "${root}/lib" PARENT_SCOPE)
  if(TARGET torch AND NOT TARGET Oxytorch::torch)
    add_library(Oxytorch::torch INTERFACE IMPORTED)
    set_target_properties(Oxytorch::torch PROPERTIES INTERFACE_LINK_LIBRARIES torch)
  endif()
  if(TARGET Oxytorch::torch)
    set(Oxytorch_TORCH_FOUND TRUE PARENT_SCOPE)
    return()
  endif()
  foreach(file include/torch/csrc/api/include/torch/torch.h lib/libtorch.so lib/libtorch_cpu.so lib/libc10.so)
    if(NOT EXISTS "${root}/${file}")
      set(Oxytorch_TORCH_PROBLEM "the torch in ${root} has no ${file}; install it anew, or name another one in \
CMAKE_PREFIX_PATH or Torch_DIR." PARENT_SCOPE)
      return()
    endif()
  endforeach()

  # What torch was built with, as it says in its own files: its headers differ by these, and older archives come with
  # either ABI of std::string.
  set(definitions "")
  if(EXISTS "${Torch_DIR}/../Caffe2/Caffe2Targets.cmake")
    file(READ "${Torch_DIR}/../Caffe2/Caffe2Targets.cmake" text)
    if(text MATCHES "torch_cpu PROPERTIES[ \r\n]+INTERFACE_COMPILE_DEFINITIONS \"([^\"]*)\"")
      set(definitions "${CMAKE_MATCH_1}")
    endif()
  endif()
  file(READ "${Torch_DIR}/TorchConfig.cmake" text)
  if(text MATCHES "_GLIBCXX_USE_CXX11_ABI=[01]")
    list(APPEND definitions "${CMAKE_MATCH_0}")
  endif()

  add_library(Oxytorch::torch INTERFACE IMPORTED)
  # libtorch_cpu and libtorch register kernels (libtorch brings those of CUDA), which no symbol shows: linkers that drop
  # what seems unused must keep them.
  set(lib "${root}/lib")
  set_target_properties(Oxytorch::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "${definitions}"
    INTERFACE_LINK_LIBRARIES "-Wl,--push-state,--no-as-needed,\"${lib}/libtorch.so\",\"${lib}/libtorch_cpu.so\",--pop-state;${lib}/libc10.so")
  set(Oxytorch_TORCH_FOUND TRUE PARENT_SCOPE)
endfunction()
